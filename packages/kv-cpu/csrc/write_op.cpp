// What brings tokens into pages and moves them there.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "name.h"
#include "pages.h"

namespace kv {
namespace {

constexpr int kRun = 256;     // tokens that are encoded at once, at most
constexpr int kShare = 512;   // columns of `keep` that a worker takes at a time
constexpr int kWorth = 1024;  // tokens to encode that are worth another thread

// Tokens first .. last - 1 of what is given for streams[i]; those kept come to slots from `slot`.
struct Share {
  int64_t i, first, last, slot;
};

struct Fresh {
  Vectors key, value;
  const float* score;
  Integers position;
};

class Writer {
 public:
  Writer(const Tier& tier, const Coder& coder, const Fresh& fresh, int64_t columns)
      : tier_(tier), coder_(coder), fresh_(fresh), columns_(columns) {}

  void write(const Share& share, int64_t stream, const bool* keep) const {
    int64_t kept[kRun], slot = share.slot;
    int count = 0;
    for (int64_t token = share.first; token < share.last; ++token) {
      if (!keep[token]) continue;
      kept[count++] = token;
      if (count == kRun || (slot + count) % tier_.tokens == 0) {
        write(share.i, stream, slot, kept, count);
        slot += count, count = 0;
      }
    }
    if (count) write(share.i, stream, slot, kept, count);
  }

 private:
  // Tokens that lie side by side in one page.
  void write(int64_t i, int64_t stream, int64_t slot, const int64_t* kept, int count) const {
    uint8_t* page = tier_.page(stream, slot);
    const int64_t row = slot % tier_.tokens;
    const uint8_t* x[kRun];
    for (int which = 0; which < 2; ++which) {
      const Vectors& vectors = which ? fresh_.value : fresh_.key;
      for (int k = 0; k < count; ++k) x[k] = vectors.at(i, kept[k]);
      tier_.encode(coder_, which, vectors.number, x, count, page, row);
    }
    for (int k = 0; k < count; ++k) {
      const int64_t at = i * columns_ + kept[k];
      if (fresh_.score) std::memcpy(page + tier_.score + 4 * (row + k), fresh_.score + at, 4);
      if (!fresh_.position.data) continue;
      const int32_t position = int32_t(fresh_.position[at]);
      std::memcpy(page + tier_.position + 4 * (row + k), &position, 4);
    }
  }

  const Tier& tier_;
  const Coder& coder_;
  const Fresh& fresh_;
  const int64_t columns_;
};

// Writes the kept tokens of keep [S, L] to the slots of streams[i] from start[i].
// beside: the scores (float32) and the positions [S, L], where pages hold them
void page_write(Tensor data, Tensor table, std::vector<int64_t> numbers, Tensor streams,
                Tensor start, Tensor keep, Tensor key, Tensor value, std::vector<Tensor> beside,
                Name isa) {
  STD_TORCH_CHECK(numbers.size() == kTierNumbers && keep.dim() == 2, "a tier has ", kTierNumbers,
                  " numbers, and what is kept two dimensions");
  const Tier tier = tier_of(data, table, numbers.data());
  const Coder& coder = coder_of(isa.text);
  const int64_t count = keep.size(0), columns = keep.size(1);
  const bool* marks = data_of<bool>(keep, ScalarType::Bool, count * columns, "keep");
  const Integers named = integers_of(streams, count, "streams");
  const Integers first = integers_of(start, count, "start");
  Fresh fresh{Vectors(key, tier.format[0].dim), Vectors(value, tier.format[1].dim), nullptr, {}};
  STD_TORCH_CHECK(key.size(0) == count && key.size(1) == columns && value.size(0) == count &&
                      value.size(1) == columns,
                  "there must be a key and a value for each mark of keep");
  size_t at = 0;
  STD_TORCH_CHECK(beside.size() == size_t(tier.score >= 0) + size_t(tier.position >= 0),
                  "scores and positions must be given where pages hold them, and nowhere else");
  if (tier.score >= 0)
    fresh.score = data_of<float>(beside[at++], ScalarType::Float, count * columns, "scores");
  if (tier.position >= 0)
    fresh.position = integers_of(beside[at], count * columns, "positions");
  std::vector<Share> shares;
  for (int64_t i = 0; i < count; ++i) {
    const bool* kept = marks + i * columns;
    int64_t slot = first[i];
    STD_TORCH_CHECK(slot <= tier.width * tier.tokens, "tokens are to come to slot ", slot,
                    "; the table has room for ", tier.width * tier.tokens);
    for (int64_t token = 0; token < columns; token += kShare) {
      const int64_t last = token + kShare < columns ? token + kShare : columns;
      int64_t more = 0;
      for (int64_t k = token; k < last; ++k) more += kept[k];
      if (more) shares.push_back({i, token, last, slot});
      slot += more;
    }
    tier.check(named[i], first[i], slot);
  }
  const Writer writer(tier, coder, fresh, columns);
  for_all(shares.size(), kWorth / (columns < kShare ? columns + 1 : kShare), [&](int64_t k) {
    const Share& share = shares[k];
    writer.write(share, named[share.i], marks + share.i * columns);
  });
}

// The rows of streams[i] that stay [S, L] move to its front: the first past the end that there will
// be goes into the first gap before it.
void page_close_up(Tensor data, Tensor table, std::vector<int64_t> numbers, Tensor streams,
                   Tensor stay) {
  STD_TORCH_CHECK(numbers.size() == kTierNumbers && stay.dim() == 2, "a tier has ", kTierNumbers,
                  " numbers, and what stays two dimensions");
  const Tier tier = tier_of(data, table, numbers.data());
  const int64_t count = stay.size(0), columns = stay.size(1);
  const bool* marks = data_of<bool>(stay, ScalarType::Bool, count * columns, "stay");
  const Integers named = integers_of(streams, count, "streams");
  std::vector<int64_t> after(count);
  for (int64_t i = 0; i < count; ++i) {
    const bool* stays = marks + i * columns;
    int64_t end = columns;
    while (end > 0 && !stays[end - 1]) --end;
    tier.check(named[i], 0, end);
    for (int64_t slot = 0; slot < end; ++slot) after[i] += stays[slot];
  }
  for_all(count, kWorth / (columns + 1), [&](int64_t i) {
    const bool* stays = marks + i * columns;
    const int64_t stream = named[i];
    int64_t gap = 0;
    for (int64_t slot = after[i]; slot < columns; ++slot) {
      if (!stays[slot]) continue;
      while (stays[gap]) ++gap;  // there are as many gaps before the end as rows past it
      tier.move(tier.page(stream, slot), slot % tier.tokens, tier.page(stream, gap),
                gap % tier.tokens);
      ++gap;
    }
  });
}

// Copies whole pages; no target may be a source.
void page_copy(Tensor data, Tensor source, Tensor target) {
  STD_TORCH_CHECK(data.scalar_type() == ScalarType::Byte && data.is_contiguous() && data.dim() == 2,
                  "pages must be contiguous uint8 [P, bytes]");
  const int64_t count = source.numel(), pages = data.size(0), bytes = data.size(1);
  const Integers from = integers_of(source, count, "sources"), to = integers_of(target, count, "targets");
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(from[i] >= 0 && from[i] < pages && to[i] >= 0 && to[i] < pages, "page ",
                    from[i], " is to be copied to page ", to[i], "; there are ", pages);
  auto* first = static_cast<uint8_t*>(data.mutable_data_ptr());
  for_all(count, (1 << 16) / (bytes + 1), [&](int64_t i) {
    std::memmove(first + to[i] * bytes, first + from[i] * bytes, bytes);
  });
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def(
      "page_write(Tensor(a!) data, Tensor table, int[] tier, Tensor streams, Tensor start, "
      "Tensor keep, Tensor key, Tensor value, Tensor[] beside, str isa) -> ()");
  m.def(
      "page_close_up(Tensor(a!) data, Tensor table, int[] tier, Tensor streams, Tensor stay) -> ()");
  m.def("page_copy(Tensor(a!) data, Tensor source, Tensor target) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) {
  m.impl("page_write", TORCH_BOX(&kv::page_write));
  m.impl("page_close_up", TORCH_BOX(&kv::page_close_up));
  m.impl("page_copy", TORCH_BOX(&kv::page_copy));
}
