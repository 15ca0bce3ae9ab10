// The operators as torch sees them, through its stable ABI alone.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "arguments.h"
#include "name.h"

namespace kv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kTensors = 4;  // of a part: data, table, length, place; or key, value, place, place
constexpr int kNumbers = 18;

Integers integers_of(const Tensor& x) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long,
                  "tables and lengths must be int32 or int64");
  STD_TORCH_CHECK(x.is_contiguous(), "tables and lengths must be contiguous");
  return {x.const_data_ptr(), type == ScalarType::Long};
}

Format format_of(const int64_t* numbers) {
  Format format{Number(numbers[0]), int(numbers[1]), int(numbers[2]), int(numbers[3]), 0, 0};
  STD_TORCH_CHECK(format.dim >= 1 && format.dim <= kMostDim, "a vector has ", format.dim,
                  " dimensions; 1 to ", kMostDim, " are possible");
  if (format.number == Number::kCodes) {
    format.stride = (format.dim * format.bits + 7) / 8;
    format.groups = (format.dim + format.group - 1) / format.group;
  }
  return format;
}

void steps(const Tensor& x, int64_t* to) {
  STD_TORCH_CHECK(x.stride(3) == 1 || x.size(3) == 1, "numbers of a vector must be consecutive");
  for (int i = 0; i < 3; ++i) to[i] = x.stride(i) * int64_t(x.element_size());
}

void read_pages(const Job& job, const Tensor* tensors, const int64_t* numbers, Part& part) {
  const Tensor &data = tensors[0], &table = tensors[1];
  part.data = static_cast<const uint8_t*>(data.const_data_ptr());
  part.pages = data.size(0);
  part.page_step = data.stride(0);
  STD_TORCH_CHECK(data.stride(1) == 1 || data.size(1) <= 1, "bytes of a page must be consecutive");
  part.tokens = numbers[0];
  std::copy_n(numbers + 1, 4, part.offset);
  part.position_offset = numbers[5];
  part.reverse = numbers[6] != 0;
  part.table = integers_of(table);
  part.table_width = table.size(2);
  part.length = integers_of(tensors[2]);
  const Format* formats[] = {&part.key, &part.value};
  for (int i = 0; i < 2; ++i) {
    const int64_t codes = formats[i]->bytes(), meta = formats[i]->meta_bytes();
    STD_TORCH_CHECK(part.tokens >= 1 &&
                        part.offset[2 * i] + part.tokens * codes <= data.size(1) &&
                        part.offset[2 * i + 1] + part.tokens * meta <= data.size(1) &&
                        part.position_offset + 4 * part.tokens <= std::max<int64_t>(
                            data.size(1), 4 * part.tokens - 1),
                    "a page has ", data.size(1), " bytes, fewer than its tokens take");
  }
  for (int64_t i = 0; i < job.streams(); ++i) {
    const int64_t length = part.length[i], room = part.table_width * part.tokens;
    STD_TORCH_CHECK(length >= 0 && length <= room, "a stream has ", length,
                    " tokens; its table has room for 0 to ", room);
    STD_TORCH_CHECK(job.watches.empty() || length <= part.width, "a stream has ", length,
                    " tokens; it was said that none has more than ", part.width);
  }
}

void read_tensors(const Tensor* tensors, Part& part) {
  part.keys = static_cast<const uint8_t*>(tensors[0].const_data_ptr());
  part.values = static_cast<const uint8_t*>(tensors[1].const_data_ptr());
  steps(tensors[0], part.key_step);
  steps(tensors[1], part.value_step);
}

void read_place(const Tensor& place, Part& part) {
  STD_TORCH_CHECK(place.scalar_type() == ScalarType::Long, "positions must be int64");
  part.place = static_cast<const int64_t*>(place.const_data_ptr());
  const bool shared = place.dim() == 2;
  part.place_step[0] = place.stride(0);
  part.place_step[1] = shared ? 0 : place.stride(1);
  part.place_step[2] = place.stride(shared ? 1 : 2);
}

// numbers: paged, width, key (number, dim, bits, group), value (the same), place is given, then of
// pages: tokens, four offsets, offset of positions, reverse
Part read_part(const Job& job, const Tensor* tensors, const int64_t* numbers) {
  Part part;
  part.paged = numbers[0] != 0;
  part.width = numbers[1];
  part.key = format_of(numbers + 2);
  part.value = format_of(numbers + 6);
  if (part.paged)
    read_pages(job, tensors, numbers + 11, part);
  else
    read_tensors(tensors, part);
  if (numbers[10]) read_place(tensors[part.paged ? 3 : 2], part);
  return part;
}

}  // namespace

Number number_of(ScalarType type) {
  if (type == ScalarType::Float) return Number::kFloat32;
  if (type == ScalarType::Half) return Number::kFloat16;
  STD_TORCH_CHECK(type == ScalarType::BFloat16, "numbers must be float32, float16 or bfloat16");
  return Number::kBFloat16;
}

Chunk read_chunk(Job& job, const Tensor& q, const Tensor& position, int64_t value_dim, double scale,
                 const std::string& isa) {
  job.kernels = kernels(isa.c_str());
  STD_TORCH_CHECK(job.kernels, "no kernels for ", isa, " here; there are ", names(false));
  STD_TORCH_CHECK(q.dim() == 5, "queries must be [B, H, G, L, D]");
  job.sequences = q.size(0), job.heads = q.size(1), job.group = q.size(2), job.key_dim = q.size(4);
  job.value_dim = value_dim;
  STD_TORCH_CHECK(job.key_dim <= kMostDim && value_dim <= kMostDim, "vectors have ", job.key_dim,
                  " and ", value_dim, " dimensions; ", kMostDim, " are the most");
  job.scale = float(scale);
  job.query_number = number_of(q.scalar_type());
  job.queries = static_cast<const uint8_t*>(q.const_data_ptr());
  Chunk chunk{q.size(3), {}, nullptr};
  for (int i = 0; i < 5; ++i) chunk.query_step[i] = q.stride(i) * int64_t(q.element_size());
  STD_TORCH_CHECK(position.scalar_type() == ScalarType::Long && position.is_contiguous() &&
                      int64_t(position.numel()) == job.sequences * chunk.length,
                  "positions must be a contiguous int64 for each query");
  chunk.position = static_cast<const int64_t*>(position.const_data_ptr());
  return chunk;
}

void read_watches(Job& job, const std::vector<int64_t>& numbers, const std::vector<double>& above) {
  size_t at = 0;
  for (double share : above) {
    STD_TORCH_CHECK(at + 3 <= numbers.size() && numbers[at + 2] >= 0 &&
                        at + 3 + numbers[at + 2] <= numbers.size(),
                    "what to watch is cut short");
    Watch watch{Group(numbers[at]), numbers[at + 1], float(share), {}, job.terms};
    for (int64_t i = 0; i < numbers[at + 2]; ++i) watch.terms.push_back(Term(numbers[at + 3 + i]));
    at += 3 + numbers[at + 2];
    job.terms += int(watch.terms.size());
    job.watches.push_back(watch);
  }
}

void read_parts(Job& job, const Tensor& q, const std::vector<Tensor>& tensors,
                const std::vector<int64_t>& numbers, bool zeros, std::vector<Tensor>& results) {
  auto make = [&](int64_t rows, int64_t width, ScalarType type) {
    const std::vector<int64_t> sizes{rows, job.sequences, job.heads, width};
    results.push_back(zeros ? torch::stable::new_zeros(q, sizes, type)
                            : torch::stable::new_empty(q, sizes, type));
    return results.back().mutable_data_ptr();
  };
  STD_TORCH_CHECK(numbers.size() % kNumbers == 0 &&
                      tensors.size() == numbers.size() / kNumbers * kTensors,
                  "a part takes ", kNumbers, " numbers and ", kTensors, " tensors");
  for (size_t i = 0; i < numbers.size() / kNumbers; ++i) {
    job.parts.push_back(read_part(job, &tensors[i * kTensors], &numbers[i * kNumbers]));
    const Part& part = job.parts.back();
    STD_TORCH_CHECK(part.key.dim == job.key_dim && part.value.dim == job.value_dim,
                    "a part has vectors of other dimensions");
    if (job.watches.empty()) continue;
    for (const Watch& watch : job.watches)
      STD_TORCH_CHECK(part.place || watch.skip <= 1, "a part lacks positions to skip by");
    job.sums.push_back(static_cast<float*>(make(job.terms, part.width, ScalarType::Float)));
    const auto count = int64_t(job.watches.size());
    job.seen.push_back(static_cast<int32_t*>(make(count, part.width, ScalarType::Int)));
  }
}

void check(const Job& job, const Fault& fault) {
  STD_TORCH_CHECK(fault.part < 0, "pages[", fault.part.load(), "] has page ", fault.page.load(),
                  " in its table; its pool has ", job.parts[std::max(0, fault.part.load())].pages,
                  " pages");
}

void parallel(int64_t count, Body body, void* context) {
  torch::stable::parallel_for(0, count, 1, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) body(i, context);
  });
}

namespace {

// The output [B, H, G, Dv] and the log-sum-exp [B, H, G] in float32, then of each part the sums
// [terms, B, H, width] and counts [watches, B, H, width] where anything is watched.
std::vector<Tensor> decode(Tensor q, Tensor position, std::vector<Tensor> tensors,
                           std::vector<int64_t> parts, std::vector<int64_t> watches,
                           std::vector<double> above, int64_t value_dim, double scale,
                           Name isa) {
  Job job;
  job.kernels = kernels(isa.text.c_str());
  STD_TORCH_CHECK(job.kernels, "no kernels for ", isa.text, " here; there are ", names(false));
  STD_TORCH_CHECK(q.dim() == 5 && q.size(3) == 1, "queries must be [B, H, G, 1, D]");
  job.sequences = q.size(0), job.heads = q.size(1), job.group = q.size(2), job.key_dim = q.size(4);
  job.value_dim = value_dim;
  STD_TORCH_CHECK(job.key_dim <= kMostDim && value_dim <= kMostDim, "vectors have ", job.key_dim,
                  " and ", value_dim, " dimensions; ", kMostDim, " are the most");
  job.query_width = padded(int(job.key_dim) + 7), job.value_width = padded(int(value_dim));
  job.scale = float(scale);
  job.query_number = number_of(q.scalar_type());
  job.queries = static_cast<const uint8_t*>(q.const_data_ptr());
  for (int i = 0; i < 4; ++i) job.query_step[i] = q.stride(i < 3 ? i : 4) * q.element_size();
  STD_TORCH_CHECK(position.scalar_type() == ScalarType::Long && position.is_contiguous() &&
                      position.numel() == job.sequences,
                  "positions must be a contiguous int64 for each sequence");
  job.position = static_cast<const int64_t*>(position.const_data_ptr());
  read_watches(job, watches, above);
  for (Watch& watch : job.watches)  // of one query the largest sum is the sum of the largest
    if (watch.group == Group::kMaxOfSums) watch.group = Group::kMax;
  std::vector<Tensor> results{
      torch::stable::new_empty(q, {job.sequences, job.heads, job.group, value_dim},
                               ScalarType::Float),
      torch::stable::new_empty(q, {job.sequences, job.heads, job.group}, ScalarType::Float)};
  read_parts(job, q, tensors, parts, false, results);
  job.out = static_cast<float*>(results[0].mutable_data_ptr());
  job.lse = static_cast<float*>(results[1].mutable_data_ptr());
  Fault fault;
  run(job, int(torch::stable::get_num_threads()), parallel, fault);
  check(job, fault);
  return results;
}

std::string isa(bool all) { return names(all); }

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY(kv_cpu, m) {
  m.def(
      "decode(Tensor q, Tensor position, Tensor[] tensors, int[] parts, int[] watches, "
      "float[] above, int value_dim, float scale, str isa) -> Tensor[]");
  m.def("isa(bool all) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) { m.impl("decode", TORCH_BOX(&kv::decode)); }

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&kv::isa));
}
