// The operator that selects the pages that a decode step reads, by bounds or codes of their keys.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "arguments.h"
#include "boundary.h"
#include "page_codes.h"

namespace kv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kWorth = 1 << 16;  // numbers of bounds that justify another thread
constexpr int kPart = 64;  // bounds of so many pages are read while those of as many are prefetched
constexpr double kNear = 1e-6;  // of a page, as in Python: a share that is whole, but for rounding
constexpr int kAhead = 4;  // products may prefetch a part of the lines that are given
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The pages of a table row: those that are full, of them those with bounds, and how many are read.
struct Held {
  int64_t full, bounded, some;
  bool partial;  // the page that is appended to, which is read
};

// The memory of a thread for one table row.
struct Scratch {
  std::vector<Line> queries, prepared, logits;
  std::vector<float> sums, found, score, sorted;
  std::vector<int64_t> order;
  std::vector<Span> spans;
  std::vector<int8_t> bytes;
  std::vector<int32_t> totals;
  std::vector<const uint8_t*> pages;
};

// The products of codes of the kernels of attention.
const CodeKernels* codes_of(const Kernels& kernels) {
  if (&kernels == &plain_kernels) return &plain_codes;
#ifdef KV_X86
  if (&kernels == &avx2_kernels) return &avx2_codes;
  if (&kernels == &avx_vnni_kernels) return &avx_vnni_codes;
  return &kernels == &avx512_kernels ? &avx512_codes : &vnni_codes;
#elif defined(KV_ARM)
  return &kernels == &neon_kernels ? &neon_codes : &dotprod_codes;
#else
  return &plain_codes;
#endif
}

// The largest of some numbers, of those that are numbers.
float largest(const float* x, int64_t count) {
  float most[kLanes];  // for vectorization
  std::fill_n(most, kLanes, std::numeric_limits<float>::lowest());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int k = 0; k < kLanes; ++k) most[k] = x[i + k] > most[k] ? x[i + k] : most[k];
  for (; i < count; ++i) most[0] = x[i] > most[0] ? x[i] : most[0];
  return *std::max_element(most, most + kLanes);
}

class Selection {
 public:
  Selection(const Tensor& q, const Tensor& both, const Tensor& rotation, const Tensor& count,
            const Tensor& table, const Tensor& length, double share, int64_t most, int64_t tokens,
            int64_t first, int64_t last, bool reverse, const Name& isa)
      : kernels_(kernels_of(isa)), reverse_(reverse) {
    q_ = view(q, {"q"}, kFloats, {kAny, kAny, kAny, kAny}, Lay::kRows);
    sequences_ = q_.size(0), heads_ = q_.size(1);
    group_ = int(within({"queries of a KV head"}, q_.size(2), 1, kMostGroup));
    dim_ = int(within({"dimensions of a key"}, q_.size(3), 1, kMostDim / 2));
    tokens_ = within({"tokens of a page"}, tokens, 1, kMost);
    in_pages_ = both.dim() == 2;  // by the number of a page; otherwise by column of a table row
    coded_ = both.scalar_type() == ScalarType::Byte;
    const int64_t wide = coded_ ? product(tokens_, code_bytes(dim_, 1)) : 2 * dim_;
    const Kinds kinds = coded_ ? kBytes : kBFloat16;
    both_ = in_pages_ ? view(both, {"bounds"}, kinds, {kAny, wide}, Lay::kRows)
                      : view(both, {"bounds"}, kinds, {sequences_, heads_, kAny, wide}, Lay::kRows);
    if (coded_)
      rotation_ = view(rotation, {"rotation"}, kFloat32, {dim_, padded(dim_)}, Lay::kContiguous);
    table_ = view(table, {"table"}, kIntegers, {sequences_, heads_, kAny}, Lay::kContiguous);
    auto numbers = [&](const Tensor& x, const char* name) {
      return integers_of(view(x, {name}, kIntegers, {sequences_, heads_}, Lay::kContiguous));
    };
    const Integers counts = numbers(count, "count");
    length_ = numbers(length, "length");
    within({"first"}, first, 0, kMost), within({"last"}, last, 0, kMost);
    within({"most"}, most, 0, kMost);
    if (!(share >= 0 && share <= 100)) refuse("share is ", share, "; it must be 0 to 100");
    begin_ = (first + tokens_ - 1) / tokens_;
    const int64_t width = table_.size(2), bounded = in_pages_ ? width : both_.size(2);
    for (int64_t row = 0; row < sequences_ * heads_; ++row) {
      const int64_t there = within({"a length"}, length_[row], 0, product(width, tokens_));
      Held held;
      held.full = there / tokens_, held.partial = there % tokens_ != 0;
      held.bounded = std::min(within({"a count"}, counts[row], 0, bounded), held.full);
      const int64_t end = std::max<int64_t>(there - last, 0) / tokens_;  // the newest from there on
      ends_.push_back(std::min(end, held.bounded));
      const int64_t always = std::min(begin_, ends_[row]) + held.full - ends_[row];
      const int64_t wanted = limit(held.full + held.partial, share, most) - held.partial;
      held.some = std::min(std::max(wanted, always), held.full);
      most_ = std::max(most_, held.some), all_ &= held.some == held.full;
      held_.push_back(held);
    }
    if (in_pages_ && !all_) check_pages();
  }

  // How many of some pages are read: at most so many, and a percentage, rounded up; 0 for none.
  static int64_t limit(int64_t pages, double share, int64_t most) {
    const int64_t some = std::min(pages, most);
    if (!share) return some;
    return std::min(some, int64_t(std::ceil(double(pages) * share / 100 - kNear)));
  }

  // The table [B, H, T] and the lengths [B, H] of the pages that are read; nothing: all are.
  std::vector<Tensor> run(const Tensor& q) {
    if (all_) return {};
    width_ = most_ + 1;
    std::vector<Tensor> results{
        torch::stable::new_empty(q, {sequences_, heads_, width_}, ScalarType::Int),
        torch::stable::new_empty(q, {sequences_, heads_}, ScalarType::Int)};
    pages_ = static_cast<int32_t*>(results[0].mutable_data_ptr());
    lengths_ = static_cast<int32_t*>(results[1].mutable_data_ptr());
    const int64_t rows = sequences_ * heads_;
    const int64_t width = in_pages_ ? table_.size(2) : both_.size(2);
    const int64_t work = product(product(width, coded_ ? tokens_ * dim_ : 2 * dim_), rows);
    const int64_t threads =
        std::min({int64_t(torch::stable::get_num_threads()), rows, work / kWorth + 1});
    for_all(threads, 1, [&](int64_t) {
      Scratch scratch;
      for (int64_t row; (row = next_++) < rows;) select(row, scratch);
    });
    return results;
  }

 private:
  // Raises if a page whose bounds may be read does not exist.
  void check_pages() const {
    const Integers table = integers_of(table_);
    for (int64_t row = 0; row < sequences_ * heads_; ++row)
      for (int64_t i = 0; i < held_[row].bounded; ++i)
        within({"a page of the table"}, table[entry(row, i)], 0, both_.size(0) - 1);
  }

  int64_t entry(int64_t row, int64_t column) const {
    const int64_t width = table_.size(2);
    return row * width + (reverse_ ? width - 1 - column : column);
  }

  void select(int64_t row, Scratch& scratch) {
    const Held& held = held_[row];
    std::vector<int64_t>& order = scratch.order;
    order.clear();
    const int64_t end = ends_[row], begin = std::min(begin_, end);
    for (int64_t i = 0; i < begin; ++i) order.push_back(i);
    const int64_t rest = held.some - begin - (held.full - end);  // of those in between
    if (rest >= end - begin) {
      for (int64_t i = begin; i < end; ++i) order.push_back(i);
    } else if (rest > 0) {
      const float* score = scores(row, begin, end, scratch);
      scratch.sorted.assign(score + begin, score + end);
      float* least = scratch.sorted.data() + rest - 1;  // of those that are read
      std::nth_element(scratch.sorted.data(), least, scratch.sorted.data() + end - begin,
                       std::greater<float>());
      int64_t equal = rest;
      for (int64_t i = begin; i < end; ++i) equal -= score[i] > *least;
      for (int64_t i = begin; i < end; ++i)
        if (score[i] > *least || (score[i] == *least && equal-- > 0)) order.push_back(i);
    }
    for (int64_t i = end; i < held.full; ++i) order.push_back(i);
    if (held.partial) order.push_back(held.full);
    const Integers table = integers_of(table_);
    int32_t* to = pages_ + row * width_;
    for (int64_t i : order) *to++ = int32_t(table[entry(row, i)]);
    std::fill(to, pages_ + (row + 1) * width_, 0);
    lengths_[row] = int32_t(held.some * tokens_ + length_[row] % tokens_);
  }

  // The scores of pages with bounds, by page; those before `begin` and from `end` on are undefined.
  const float* scores(int64_t row, int64_t begin, int64_t end, Scratch& scratch) {
    const int64_t count = held_[row].bounded;
    scratch.found.resize(std::max<int64_t>(padded(dim_), group_ * count));
    coded_ ? estimate(row, count, scratch) : bound(row, count, scratch);
    scratch.score.assign(count, -kInfinity);
    float* score = scratch.score.data();
    const float* found = scratch.found.data();
    for (int g = 0; g < group_; ++g, found += count) {
      const float best = largest(found, count);
      bool numbers = true;
      for (int64_t i = begin; i < end; ++i) {
        const float below = found[i] - best;
        numbers &= below == below;
        score[i] = below > score[i] ? below : score[i];
      }
      for (int64_t i = begin; !numbers && i < end; ++i)
        if (std::isnan(found[i] - best)) score[i] = kInfinity;
    }
    return scratch.score.data();
  }

  // Where the bounds of a page of a table row are.
  const uint8_t* place(int64_t row, int64_t column) const {
    if (in_pages_) return both_.data + integers_of(table_)[entry(row, column)] * both_.step(0);
    const uint8_t* from = both_.data + row / heads_ * both_.step(0) + row % heads_ * both_.step(1);
    return from + column * both_.step(2);
  }

  // Query g of a table row, in float32.
  void query(int64_t row, int g, float* to) const {
    const uint8_t* from = q_.data + row / heads_ * q_.step(0) + row % heads_ * q_.step(1);
    kernels_->widen(number_of(q_.type), from + g * q_.step(2), dim_, to);
  }

  // The largest logits of all queries by codes, one row of pages after the other.
  void estimate(int64_t row, int64_t count, Scratch& scratch) const {
    const int width = padded(dim_);
    scratch.queries.resize(2 * width / kLanes);
    scratch.bytes.resize(group_ * width);
    scratch.sums.resize(group_), scratch.totals.resize(group_);
    float* numbers = scratch.queries[0].numbers;
    const CodeKernels& codes = *codes_of(*kernels_);
    for (int g = 0; g < group_; ++g) {
      query(row, g, numbers);
      codes.rotate(numbers, rotation_.as<float>(), dim_, numbers + width,
                 scratch.bytes.data() + g * width, scratch.sums[g], scratch.totals[g]);
    }
    const CodedQueries queries{scratch.bytes.data(), scratch.sums.data(), scratch.totals.data(),
                               group_, width};
    scratch.pages.resize(count);
    for (int64_t i = 0; i < count; ++i) scratch.pages[i] = place(row, i);
    for (int64_t i = 0; i < count; i += kBlock)
      codes.largest(queries, scratch.pages.data() + i, int(std::min<int64_t>(kBlock, count - i)),
                    int(tokens_), scratch.found.data() + i, count);
  }

  // The bounds of all queries, one row of pages after the other.
  void bound(int64_t row, int64_t count, Scratch& scratch) {
    const int wide = 2 * dim_, width = padded(wide + 7);
    scratch.queries.assign(int64_t(group_) * padded(width) / kLanes, Line{});
    scratch.sums.assign(group_, 0);
    float* rows = scratch.queries[0].numbers;
    for (int g = 0; g < group_; ++g) {
      query(row, g, scratch.found.data());
      float* to = rows + int64_t(g) * width;
      for (int d = 0; d < dim_; ++d) {
        const float x = scratch.found[d];
        to[d] = x > 0 ? x : x < 0 ? 0 : x, to[dim_ + d] = x < 0 ? x : 0;
        scratch.sums[g] += x;
      }
    }
    const Format format{Number::kBFloat16, wide, 0, 0, 0, 0};
    const Queries queries{rows, scratch.sums.data(), group_, width};
    const int64_t size = kernels_->prepared_size ? kernels_->prepared_size(format, group_) : 0;
    void* prepared = nullptr;
    if (size) {
      scratch.prepared.resize((size + sizeof(Line) - 1) / sizeof(Line));
      prepared = scratch.prepared.data();
      kernels_->prepare(format, queries, prepared);
    }
    scratch.logits.resize(int64_t(group_) * kBlock / kLanes);
    dot(format, queries, prepared, row, count, scratch);
  }

  // The same for prepared queries.
  void dot(const Format& format, const Queries& queries, const void* prepared, int64_t row,
           int64_t count, Scratch& scratch) {
    const uint8_t* from = in_pages_ ? both_.data : place(row, 0);
    const int64_t step = both_.step(in_pages_ ? 0 : 2);
    const Integers table = integers_of(table_);
    const bool in_strips = kernels_->strips && kernels_->strips(format);
    float* logits = scratch.logits[0].numbers;
    if (kernels_->begin) kernels_->begin();
    const uint8_t* address[2][kPart];
    auto locate = [&](int64_t first, int some, const uint8_t** to) {
      for (int i = 0; i < padded(some); ++i) {
        const int64_t column = first + std::min(i, some - 1);
        to[i] = from + (in_pages_ ? table[entry(row, column)] : column) * step;
      }
    };
    locate(0, int(std::min<int64_t>(kPart, count)), address[0]);
    for (int64_t first = 0, turn = 0; first < count; first += kPart, turn ^= 1) {
      const int some = int(std::min<int64_t>(kPart, count - first));
      const uint8_t *const *here = address[turn], **later = address[turn ^ 1];
      Strips strips;  // scattered pages have none
      for (int i = 0, n = 0; i < some; i += kLanes, ++n)
        strips.head[n] = in_pages_ ? 0 : std::min(kLanes, some - i), strips.data[n][0] = here[i];
      const Rows rows{some, here, here, in_strips ? &strips : nullptr, step};
      const int next = int(std::min<int64_t>(kPart, count - first - some));
      if (next) locate(first + some, next, later);
      const Span span{from + (first + some) * step, from + (first + some + next) * step};
      Ahead ahead;
      if (next && in_pages_) {
        ahead.rows = {next, later, later, nullptr, step}, ahead.bytes = 2 * format.dim;
        scratch.spans.clear();
        for (int i = 0; i < next; ++i) scratch.spans.push_back({later[i], later[i] + ahead.bytes});
        ahead.span[0] = scratch.spans.data(), ahead.end[0] = ahead.span[0] + next;
        ahead.lines = kAhead * next * ((ahead.bytes + 63) / 64);
      } else if (next && step == 2 * format.dim) {  // the bounds of a table row are adjacent
        ahead.span[0] = &span, ahead.end[0] = &span + 1;
        ahead.lines = kAhead * int((span.last - span.first) / 64);
      }
      kernels_->dot(format, rows, queries, prepared, logits, ahead);
      for (int g = 0; g < group_; ++g)
        std::copy_n(logits + int64_t(g) * kBlock, some, scratch.found.data() + g * count + first);
    }
    if (kernels_->end) kernels_->end();
  }

  const Kernels* kernels_;
  View q_, both_, rotation_, table_;
  Integers length_;
  int64_t sequences_, heads_, tokens_, begin_, most_ = 0, width_ = 0;
  int group_, dim_;
  bool reverse_, in_pages_ = false, coded_ = false, all_ = true;
  std::vector<Held> held_;
  std::vector<int64_t> ends_;  // of each row, the first of the last pages, which are always read
  int32_t *pages_ = nullptr, *lengths_ = nullptr;
  std::atomic<int64_t> next_{0};
};

std::vector<Tensor> page_select(Tensor q, Tensor both, Tensor rotation, Tensor count, Tensor table,
                                Tensor length, double share, int64_t most, int64_t tokens,
                                int64_t first, int64_t last, bool reverse, Name isa) {
  return Selection(q, both, rotation, count, table, length, share, most, tokens, first, last,
                   reverse, isa)
      .run(q);
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def(
      "page_select(Tensor q, Tensor both, Tensor rotation, Tensor count, Tensor table, "
      "Tensor length, float share, int most, int tokens, int first, int last, bool reverse, "
      "str isa) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) { m.impl("page_select", KV_BOX(&kv::page_select)); }
