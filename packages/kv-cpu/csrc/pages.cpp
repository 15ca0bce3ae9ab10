#include "pages.h"

#include <cstring>

namespace kv {
namespace {

Format format_of(const int64_t* numbers) {
  Format format{Number(numbers[0]), int(numbers[1]), int(numbers[2]), int(numbers[3]), 0, 0};
  STD_TORCH_CHECK(numbers[0] >= 0 && numbers[0] <= 3, "vectors of kind ", numbers[0],
                  "; there are 0 to 3");
  STD_TORCH_CHECK(numbers[1] >= 1 && numbers[1] <= kMostDim, "a vector has ", numbers[1],
                  " dimensions; 1 to ", kMostDim, " are possible");
  if (format.number != Number::kCodes) return format;
  const int bits = format.bits;
  STD_TORCH_CHECK((bits == 1 || bits == 2 || bits == 4 || bits == 8) && numbers[3] >= 1 &&
                      numbers[3] <= kMostDim,
                  "codes of ", numbers[2], " bits in groups of ", numbers[3],
                  "; codes have 1, 2, 4 or 8, groups 1 to ", kMostDim);
  format.stride = (format.dim * bits + 7) / 8;
  format.groups = (format.dim + format.group - 1) / format.group;
  return format;
}

int64_t row_bytes(const Format& format) {
  if (format.number == Number::kCodes) return format.stride;
  return format.dim * (format.number == Number::kFloat32 ? 4 : 2);
}

}  // namespace

Integers integers_of(const Tensor& x, int64_t count, const char* name) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK((type == ScalarType::Int || type == ScalarType::Long) && x.is_contiguous() &&
                      int64_t(x.numel()) == count,
                  name, " must be ", count, " contiguous integers, and are ", x.numel());
  return {x.const_data_ptr(), type == ScalarType::Long};
}

const Coder& coder_of(const std::string& isa) {
  const Coder* found = coder(isa.c_str());
  STD_TORCH_CHECK(found, "no code for ", isa, " here; there is some for ", names(false));
  return *found;
}

const Coder* coder(const char* isa) {
  if (!kernels(isa)) return nullptr;
  if (std::strcmp(isa, "plain") == 0) return &plain_coder;
#ifdef KV_X86
  // What came after AVX-512 brings nothing that is used here.
  return std::strcmp(isa, "avx2") == 0 ? &avx2_coder : &avx512_coder;
#else
  return nullptr;
#endif
}

Tier tier_of(const Tensor& data, const Tensor& table, const int64_t* numbers) {
  STD_TORCH_CHECK(data.scalar_type() == ScalarType::Byte && data.dim() == 2 &&
                      (data.stride(1) == 1 || data.size(1) <= 1),
                  "pages must be uint8 [P, bytes], the bytes of a page consecutive");
  Tier tier;
  tier.data = static_cast<uint8_t*>(const_cast<void*>(data.const_data_ptr()));
  tier.pages = data.size(0), tier.step = data.stride(0), tier.tokens = numbers[0];
  STD_TORCH_CHECK(table.dim() == 2, "a page table must be [S, T]");
  tier.streams = table.size(0), tier.width = table.size(1);
  tier.table = integers_of(table, tier.streams * tier.width, "a page table");
  tier.score = numbers[5], tier.position = numbers[6], tier.reverse = numbers[7] != 0;
  auto add = [&](int64_t offset, int64_t width) {
    STD_TORCH_CHECK(tier.tokens >= 1 && offset >= 0 && offset + tier.tokens * width <= data.size(1),
                    "a page has ", data.size(1), " bytes, fewer than its tokens take");
    tier.segment[tier.segments++] = {offset, width};
  };
  for (int which = 0; which < 2; ++which) {
    const Format& format = tier.format[which] = format_of(numbers + 8 + 4 * which);
    add(tier.code[which] = numbers[1 + 2 * which], row_bytes(format));
    tier.meta[which] = numbers[2 + 2 * which];
    if (format.groups) add(tier.meta[which], 4 * format.groups);
  }
  if (tier.score >= 0) add(tier.score, 4);
  if (tier.position >= 0) add(tier.position, 4);
  return tier;
}

void Tier::check_page(int64_t page) const {
  STD_TORCH_CHECK(page >= 0 && page < pages, "a table names page ", page, "; its pool has ", pages,
                  " pages");
}

void Tier::check_stream(int64_t stream) const {
  STD_TORCH_CHECK(stream >= 0 && stream < streams, "stream ", stream, " does not exist; there are ",
                  streams);
}

void Tier::check(int64_t stream, int64_t first, int64_t last) const {
  check_stream(stream);
  if (first >= last) return;
  STD_TORCH_CHECK(first >= 0 && last <= width * tokens, "a stream is said to have slots ", first,
                  " to ", last - 1, "; its table has room for 0 to ", width * tokens - 1);
  for (int64_t column = first / tokens; column <= (last - 1) / tokens; ++column)
    check_page(table[entry(stream, column)]);
}

void Tier::move(uint8_t* from, int64_t row, uint8_t* to, int64_t target) const {
  for (int i = 0; i < segments; ++i) {
    const auto [offset, width] = segment[i];
    std::memmove(to + offset + target * width, from + offset + row * width, width);
  }
}

void Tier::decode(const Coder& coder, int which, const uint8_t* page, int64_t row, float* to) const {
  coder.decode(format[which], page + code[which] + row * row_bytes(format[which]),
               page + meta[which] + row * 4 * format[which].groups, to);
}

void Tier::encode(const Coder& coder, int which, Number from, const uint8_t* const* x, int count,
                  uint8_t* page, int64_t row) const {
  coder.encode(format[which], from, x, count, page + code[which] + row * row_bytes(format[which]),
               page + meta[which] + row * 4 * format[which].groups);
}

Vectors::Vectors(const Tensor& x, int dim) : number(number_of(x.scalar_type())) {
  STD_TORCH_CHECK(x.dim() == 3 && x.size(2) == dim && (x.stride(2) == 1 || dim == 1),
                  "vectors must be [S, L, ", dim, "], the numbers of each consecutive");
  data = static_cast<const uint8_t*>(x.const_data_ptr());
  for (int i = 0; i < 2; ++i) step[i] = x.stride(i) * int64_t(x.element_size());
}

}  // namespace kv
