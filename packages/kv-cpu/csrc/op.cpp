// The operators, registered through torch's stable ABI alone.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "arguments.h"
#include "boundary.h"

namespace kv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kTensors = 4;  // per part: data, table, length, place; or key, value, place, place
constexpr int kNumbers = 20;
constexpr double kLeastBound = 1e-30, kMostBound = 1e30;  // of logits
constexpr double kMostLevel = 0x1p127;
constexpr int64_t kMostLevelBits = 4;
static_assert(1 << kMostLevelBits == kMostLevels);

// The dtype of a number kind, for `view`.
Kinds kinds_of(Number number) {
  if (number == Number::kFloat32) return kFloat32;
  return number == Number::kFloat16 ? kFloat16 : kBFloat16;
}

void read_pages(const Job& job, int64_t i, const Tensor* tensors, const int64_t* numbers,
                Part& part) {
  const View data = view(tensors[0], {"page data of part ", i}, kBytes, {kMany, kAny}, Lay::kRows);
  const int64_t heads = part.of ? part.of->heads : job.heads, rows = job.sequences * heads;
  const View table = view(tensors[1], {"table of part ", i}, kIntegers,
                          {job.sequences, heads, kAny}, Lay::kContiguous);
  const View length = view(tensors[2], {"lengths of part ", i}, kIntegers, {job.sequences, heads},
                           Lay::kContiguous);
  const int64_t bytes = data.size(1);
  part.data = data.data;
  part.pages = data.size(0);
  part.page_step = data.step(0);
  part.tokens = within({"tokens of a page of part ", i}, numbers[0], 1, kMost);
  std::copy_n(numbers + 1, 4, part.offset);
  part.position_offset = within({"offset of positions of part ", i}, numbers[5], -1, bytes);
  part.reverse = within({"direction of part ", i}, numbers[6], 0, 1) != 0;
  part.table = integers_of(table);
  part.table_width = table.size(2);
  part.length = integers_of(length);
  auto check = [&](Label label, Label scales, const Format& format, const int64_t* offset) {
    if (part.tokens % format.share)
      refuse(scales, ": they are shared by ", format.share, " tokens; a page has ", part.tokens,
             ", which must be a multiple");
    check_rows(label, offset[0], part.tokens, format.bytes(), bytes);
    if (format.groups)
      check_rows(scales, offset[1], part.tokens / format.share, format.meta_bytes(), bytes);
  };
  check({"offset of keys of part ", i}, {"offset of scales of keys of part ", i}, part.key,
        part.offset);
  check({"offset of values of part ", i}, {"offset of scales of values of part ", i}, part.value,
        part.offset + 2);
  if (part.position_offset >= 0)
    check_rows({"offset of positions of part ", i}, part.position_offset, part.tokens, 4, bytes);
  const int64_t room = part.table_width * part.tokens;  // both are at most kMost
  for (int64_t table_row = 0; table_row < rows; ++table_row) {
    const int64_t held = part.length[table_row];
    if (held < 0 || held > room)
      refuse("a table row has ", held, " tokens; its table covers 0 to ", room);
    if (!job.watches.empty() && held > part.width)
      refuse("a table row has ", held, " tokens; the given maximum is ", part.width);
  }
}

void read_tensors(const Job& job, int64_t i, const Tensor* tensors, Part& part) {
  const struct {
    const char* name;
    const Format& format;
    const uint8_t*& data;
    int64_t* step;
  } sides[] = {{"keys of part ", part.key, part.keys, part.key_step},
               {"values of part ", part.value, part.values, part.value_step}};
  for (const auto& [name, format, data, step] : sides) {
    if (format.number == Number::kCodes)
      refuse(name, i, " are integer codes; only pages store codes, dense tensors plain numbers");
    const View x = view(*tensors++, {name, i}, kinds_of(format.number),
                        {job.sequences, job.heads, part.width, format.dim}, Lay::kRows);
    data = x.data;
    for (int d = 0; d < 3; ++d) step[d] = x.step(d);
  }
}

// Positions of pages' tokens [B, H, at least the width], of dense tokens [B, width].
void read_place(const Job& job, int64_t i, const Tensor& place, Part& part) {
  const Label label{"positions of part ", i};
  const int64_t heads = part.of ? part.of->heads : job.heads;
  const View x = part.paged ? view(place, label, kInt64, {job.sequences, heads, kAny}, Lay::kStrided)
                            : view(place, label, kInt64, {job.sequences, part.width}, Lay::kStrided);
  if (part.paged && x.size(2) < part.width)
    refuse(label, " cover ", x.size(2), " slots of a table row; table rows have up to ", part.width,
           " tokens");
  part.place = x.as<const int64_t>();
  part.place_step[0] = x.strides[0];
  part.place_step[1] = part.paged ? x.strides[1] : 0;
  part.place_step[2] = x.strides[part.paged ? 2 : 1];
}

// numbers: paged, width, key (number, dim, bits, group), value (the same), whether positions are
// given, then for pages: tokens, four offsets, offset of positions, reverse; then the tokens that
// share scales of keys, and of values, and the levels of their codes
Part read_part(const Job& job, int64_t i, const Tensor* tensors, const int64_t* numbers,
               const HeadGroup* of) {
  Part part;
  part.of = of;
  part.paged = within({"whether there are pages in part ", i}, numbers[0], of ? 1 : 0, 1) != 0;
  part.width = within({"width of part ", i}, numbers[1], 0, kMost);
  const int64_t* levels = numbers + kNumbers;
  part.key = format_of({"keys of part ", i}, numbers + 2, levels);
  part.value = format_of({"values of part ", i}, numbers + 6, levels + levels_of(numbers + 2));
  for (const auto& [label, format, share] :
       {std::tuple{Label{"keys of part ", i}, &part.key, numbers[18]},
        std::tuple{Label{"values of part ", i}, &part.value, numbers[19]}}) {
    const bool codes = format->number == Number::kCodes, shares = codes && !format->leveled;
    if (share < 1 || share > (shares ? kMost : 1))
      refuse(label, " share scales with ", share, " tokens; it must be 1",
             shares ? " or more" : codes ? ", as codes are levels" : ", as they have none");
    format->share = int(share);
  }
  const int64_t key_dim = of ? of->key_dim : job.key_dim;
  const int64_t value_dim = of ? of->value_dim : job.value_dim;
  if (part.key.dim != key_dim || part.value.dim != value_dim)
    refuse("part ", i, " has keys and values of ", part.key.dim, " and ", part.value.dim,
           " dimensions; ", of ? "those of its heads" : "queries and the output", " have ", key_dim,
           " and ", value_dim);
  const bool placed =
      within({"whether there are positions in part ", i}, numbers[10], part.paged ? 0 : 1, 1) != 0;
  if (part.paged)
    read_pages(job, i, tensors, numbers + 11, part);
  else
    read_tensors(job, i, tensors, part);
  if (placed) read_place(job, i, tensors[part.paged ? 3 : 2], part);
  if (!part.paged || !placed)  // a placeholder for positions is not read, but must be a tensor
    view(tensors[3], {"the last tensor of part ", i}, kIntegers, {kAny, kAny}, Lay::kStrided);
  for (const Watch& watch : job.watches)
    if (!placed && watch.skip > 1)
      refuse("part ", i, " has no positions; a watch with skip ", watch.skip, " needs them");
  return part;
}

// Levels are the bits of float64 numbers. Bounds are rounded once, as those of the codec in torch.
void read_levels(Label label, const int64_t* numbers, Format& format) {
  const int count = 1 << format.bits;
  double levels[kMostLevels];
  std::memcpy(levels, numbers, sizeof(double) * count);
  format.leveled = true;
  for (int i = 0; i < count; ++i) {
    if (!(std::abs(levels[i]) <= kMostLevel) || (i > 0 && !(levels[i] > levels[i - 1])))
      refuse(label, " have level ", levels[i], " after ", i > 0 ? levels[i - 1] : -kMostLevel,
             "; levels must be ascending, from ", -kMostLevel, " to ", kMostLevel);
    format.levels[i] = float(levels[i]);
    if (i > 0) format.bounds[i - 1] = float((levels[i - 1] + levels[i]) / 2);
  }
}

// The bytes of table rows must not overflow, as work is divided by them.
void check_work(const Job& job) {
  int64_t bytes = 0;
  for (const Part& part : job.parts)
    for (int64_t table_row = 0; table_row < job.table_rows(); ++table_row)
      bytes = sum(bytes, product(part.count(table_row), part.bytes()));
  if (bytes > INT64_MAX / 2) refuse("table rows have ", bytes, " bytes or more; that is too large");
}

}  // namespace

Number number_of(ScalarType type) {
  if (type == ScalarType::Float) return Number::kFloat32;
  return type == ScalarType::Half ? Number::kFloat16 : Number::kBFloat16;
}

int64_t levels_of(const int64_t* numbers) {
  const int64_t bits = numbers[2];
  return numbers[0] == kLevels && bits >= 1 && bits <= kMostLevelBits ? int64_t(1) << bits : 0;
}

Format format_of(Label label, const int64_t* numbers, const int64_t* levels) {
  const int64_t number = numbers[0], dim = numbers[1], bits = numbers[2], group = numbers[3];
  if (number < 0 || number > kLevels)
    refuse(label, " are of kind ", number,
           "; it must be 0, codes, 1 to 3, plain numbers, or 4, codes of levels");
  if (dim < 1 || dim > kMostDim)
    refuse(label, " have ", dim, " dimensions; 1 to ", kMostDim, " are supported");
  const bool leveled = number == kLevels;
  Format format{leveled ? Number::kCodes : Number(number), int(dim), 0, 1, 0, 0};
  if (format.number != Number::kCodes) return format;
  if (leveled && (bits < 1 || bits > kMostLevelBits))
    refuse(label, " are levels of ", bits, " bits; 1 to ", kMostLevelBits, " are supported");
  if (bits != 1 && bits != 2 && bits != 3 && bits != 4 && bits != 8)
    refuse(label, " are codes of ", bits, " bits; 1, 2, 3, 4 and 8 are supported");
  if (group < 1) refuse(label, " have a scale for ", group, " dimensions; it must be 1 or more");
  if (leveled && group < dim)
    refuse(label, " are levels with a scale for ", group, " of ", dim,
           " dimensions; it must be one for all");
  format.bits = int(bits);
  format.group = int(std::min(group, dim));  // a larger group is the whole vector
  format.stride = bits == 3 ? format.low_bytes() + format.high_bytes()
                            : (format.dim * format.bits + 7) / 8;
  format.groups = (format.dim + format.group - 1) / format.group;
  if (leveled) read_levels(label, levels, format);
  return format;
}

const Kernels* kernels_of(const Name& isa) {
  const Kernels* found = kernels(isa.text.c_str());
  if (!found || found->name != isa.text)
    refuse("no kernels for ", isa.text, " here; choose one of ", names(false));
  return found;
}

const int64_t* read_positions(const Tensor& position, int64_t sequences, int64_t length) {
  const auto* found = view(position, {"position"}, kInt64, {sequences, length}, Lay::kContiguous)
                          .as<const int64_t>();
  for (int64_t i = 0; i < sequences * length; ++i)
    if (found[i] > kMostPosition)
      refuse("a query has position ", found[i], "; ", kMostPosition, " is the maximum");
  return found;
}

Chunk read_chunk(Job& job, const Tensor& q, const Tensor& position, int64_t value_dim, double scale,
                 const Name& isa) {
  job.kernels = kernels_of(isa);
  const View x = view(q, {"q"}, kFloats, {kAny, kAny, kAny, kAny, kAny}, Lay::kStrided);
  job.sequences = x.size(0), job.heads = x.size(1);
  job.group = within({"queries of a KV head"}, x.size(2), 1, kMostGroup);
  job.key_dim = within({"dimensions of q"}, x.size(4), 1, kMostDim);
  job.value_dim = within({"value_dim"}, value_dim, 1, kMostDim);
  job.scale = float(scale);
  job.query_number = number_of(x.type);
  job.queries = x.data;
  Chunk chunk{x.size(3), {}, nullptr};
  for (int i = 0; i < 5; ++i) chunk.query_step[i] = x.step(i);
  chunk.position = read_positions(position, job.sequences, chunk.length);
  return chunk;
}

void read_softmax(Job& job, double softcap, const std::vector<Tensor>& sinks) {
  job.softcap = float(softcap);
  if (!(softcap == 0 || (job.softcap > 0 && job.softcap <= kMostBound && softcap >= kLeastBound)))
    refuse("softcap is ", softcap, "; it must be 0, or ", kLeastBound, " to ", kMostBound);
  if (sinks.size() > 1) refuse("sinks are ", sinks.size(), " tensors; give one, or none");
  if (sinks.empty()) return;
  const View found =
      view(sinks[0], {"sinks"}, kFloat32, {job.heads, job.group}, Lay::kContiguous);
  job.sinks = found.as<const float>();
}

void read_watches(Job& job, const std::vector<int64_t>& numbers, const std::vector<double>& above) {
  const auto all = int64_t(numbers.size());
  int64_t at = 0;
  for (size_t i = 0; i < above.size(); ++i) {
    const Label label{"watch ", int64_t(i)};
    if (all - at < 3 || numbers[at + 2] > all - at - 3)
      refuse(label, " is truncated; it needs a group, a skip, a count, and that many terms");
    const int64_t count = within({"terms of watch ", int64_t(i)}, numbers[at + 2], 1,
                                 kMostTerms - job.terms);
    Watch watch{Group(within({"group of watch ", int64_t(i)}, numbers[at], 0, 3)),
                within({"skip of watch ", int64_t(i)}, numbers[at + 1], 0, kMostPosition),
                float(above[i]),
                {},
                job.terms};
    for (int64_t k = 0; k < count; ++k)
      watch.terms.push_back(
          Term(within({"a term of watch ", int64_t(i)}, numbers[at + 3 + k], 0, 3)));
    at += 3 + count;
    job.terms += int(count);
    job.watches.push_back(watch);
  }
  if (at != all)
    refuse("watches are ", all, " numbers; ", above.size(), " shares describe ", at, " of them");
}

void read_groups(Job& job, const std::vector<int64_t>& numbers) {
  const auto all = int64_t(numbers.size());
  std::vector<bool> named(job.heads);
  for (int64_t at = 0, i = 0; at < all; ++i) {
    const Label label{"group of heads ", i};
    if (all - at < 4 || numbers[at] < 1 || numbers[at] > all - at - 4)
      refuse(label, " is truncated; it needs a count, the dimensions of keys and of values, a "
             "number of parts, and that many heads");
    HeadGroup group;
    group.heads = numbers[at];
    group.key_dim = within({"dimensions of keys of group ", i}, numbers[at + 1], 1, job.key_dim);
    group.value_dim =
        within({"dimensions of values of group ", i}, numbers[at + 2], 1, job.value_dim);
    group.parts = within({"parts of group ", i}, numbers[at + 3], 0, kMost);
    group.index.assign(job.heads, -1);
    for (int64_t k = 0; k < group.heads; ++k) {
      const int64_t head = within({"a head of group ", i}, numbers[at + 4 + k], 0, job.heads - 1);
      if (named[head]) refuse("head ", head, " is named twice; groups have different heads");
      named[head] = true;
      group.index[head] = int32_t(k);
    }
    at += 4 + group.heads;
    job.groups.push_back(std::move(group));
  }
  const auto none = std::find(named.begin(), named.end(), false);
  if (all && none != named.end())
    refuse("head ", int64_t(none - named.begin()), " is in no group; groups have all heads");
}

void read_parts(Job& job, const std::vector<Tensor>& tensors,
                const std::vector<int64_t>& numbers) {
  std::vector<const int64_t*> parts;
  const int64_t all = int64_t(numbers.size()), given = int64_t(tensors.size());
  int64_t at = 0;
  while (all - at >= kNumbers) {
    const int64_t* part = &numbers[at];
    parts.push_back(part);
    at += kNumbers + levels_of(part + 2) + levels_of(part + 6);
  }
  if (at != all || given != int64_t(parts.size()) * kTensors)
    refuse("parts are ", all, " numbers and ", given, " tensors; each needs ", kNumbers,
           " numbers, the levels of its codes, and ", kTensors, " tensors");
  std::vector<const HeadGroup*> of(parts.size());
  int64_t grouped = 0;
  for (const HeadGroup& group : job.groups) {
    for (int64_t i = grouped; i < std::min<int64_t>(grouped + group.parts, of.size()); ++i)
      of[i] = &group;
    grouped = sum(grouped, group.parts);
  }
  if (!job.groups.empty() && grouped != int64_t(parts.size()))
    refuse("groups of heads have ", grouped, " parts; ", int64_t(parts.size()), " are given");
  for (size_t i = 0; i < parts.size(); ++i)
    job.parts.push_back(read_part(job, int64_t(i), &tensors[i * kTensors], parts[i], of[i]));
  check_work(job);
}

void make_sums(Job& job, const Tensor& q, bool zeros, std::vector<Tensor>& results) {
  if (job.watches.empty()) return;
  auto make = [&](int64_t rows, int64_t width, ScalarType type) {
    const std::vector<int64_t> sizes{rows, job.sequences, job.heads, width};
    results.push_back(zeros ? torch::stable::new_zeros(q, sizes, type)
                            : torch::stable::new_empty(q, sizes, type));
    return results.back().mutable_data_ptr();
  };
  for (const Part& part : job.parts) {
    if (job.renews && part.paged) {
      job.sums.push_back(nullptr), job.seen.push_back(nullptr);
      continue;
    }
    job.sums.push_back(static_cast<float*>(make(job.terms, part.width, ScalarType::Float)));
    const auto watches = int64_t(job.watches.size());
    job.seen.push_back(static_cast<int32_t*>(make(watches, part.width, ScalarType::Int)));
  }
}

void read_parts(Job& job, const Tensor& q, const std::vector<Tensor>& tensors,
                const std::vector<int64_t>& numbers, bool zeros, std::vector<Tensor>& results) {
  read_parts(job, tensors, numbers);
  make_sums(job, q, zeros, results);
}

void check(const Job& job, const Fault& fault) {
  const int part = fault.part;
  if (part >= 0)
    refuse("pages[", part, "] has page ", fault.page.load(), " in its table; its pool has ",
           job.parts[part].pages, " pages");
}

void parallel(int64_t count, Body body, void* context) {
  for_all(count, 1, [=](int64_t i) { body(i, context); });
}

namespace {

// The output [B, H, G, Dv] and the log-sum-exp [B, H, G] in float32, then per part the sums
// [terms, B, H, width] and counts [watches, B, H, width] if anything is observed.
std::vector<Tensor> decode(Tensor q, Tensor position, std::vector<Tensor> tensors,
                           std::vector<int64_t> parts, std::vector<int64_t> watches,
                           std::vector<double> above, int64_t value_dim, double scale,
                           double softcap, std::vector<Tensor> sinks, Name isa) {
  Job job;
  const Chunk chunk = read_chunk(job, q, position, value_dim, scale, isa);
  read_softmax(job, softcap, sinks);
  if (chunk.length != 1)
    refuse("q has ", chunk.length, " queries of a sequence; decode takes one, [B, H, G, 1, D]");
  job.query_width = padded(int(job.key_dim) + 7), job.value_width = padded(int(value_dim));
  for (int i = 0; i < 4; ++i) job.query_step[i] = chunk.query_step[i < 3 ? i : 4];
  job.position = chunk.position;
  read_watches(job, watches, above);
  for (Watch& watch : job.watches)  // for one query, the maximum of sums is the sum of maxima
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

// Version of the operators' signatures; library.py expects the same.
int64_t interface() { return 14; }

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY(kv_cpu, m) {
  m.def(
      "decode(Tensor q, Tensor position, Tensor[] tensors, int[] parts, int[] watches, "
      "float[] above, int value_dim, float scale, float softcap, Tensor[] sinks, str isa) "
      "-> Tensor[]");
  m.def("isa(bool all) -> str");
  m.def("interface() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) { m.impl("decode", KV_BOX(&kv::decode)); }

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", KV_BOX(&kv::isa));
  m.impl("interface", KV_BOX(&kv::interface));
}
