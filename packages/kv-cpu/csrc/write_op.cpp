// Operators that write tokens to pages and move them.
#include <algorithm>
#include <cstring>
#include <utility>

#include "boundary.h"
#include "marked.h"
#include "name.h"
#include "page_set.h"

namespace kv {
namespace {

struct Fresh {
  Vectors key, value;
  const float* score;
  Integers position;
};

class Writer {
 public:
  Writer(const Tier& tier, const Coder& coder, const Fresh& fresh, int64_t columns)
      : tier_(tier), coder_(coder), fresh_(fresh), columns_(columns) {}

  void write(const Share& share, const Marks& marks, int64_t table_row) const {
    over_runs(tier_, marks, share, [&](int64_t slot, const int64_t* kept, int count) {
      write(share.i, table_row, slot, kept, count);
    });
  }

 private:
  // Writes consecutive tokens of one page.
  void write(int64_t i, int64_t table_row, int64_t slot, const int64_t* kept, int count) const {
    uint8_t* page = tier_.page(table_row, slot);
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

// Writes the kept tokens of keep [S, L] to the slots of table rows[i] from start[i].
// beside: the scores (float32) and the positions [S, L], if pages store them
void page_write(Tensor data, Tensor table, std::vector<int64_t> numbers, Tensor table_rows,
                Tensor start, Tensor keep, Tensor key, Tensor value, std::vector<Tensor> beside,
                Name isa) {
  const Coder& coder = coder_of(isa);
  const View pages = pages_of(data, Use::kWrites);
  const Tier tier = tier_of(pages, table, numbers);
  const View kept = view(keep, {"keep"}, kMarks, {kAny, kAny}, Lay::kContiguous);
  const Marks marks(kept);
  const int64_t count = marks.count, columns = marks.columns;
  const View names = table_rows_of(tier, table_rows, count);
  const View starts = view(start, {"start"}, kIntegers, {count}, Lay::kContiguous);
  const View keys = view(key, {"key"}, kFloats, {count, columns, tier.format[0].dim}, Lay::kRows);
  const View values =
      view(value, {"value"}, kFloats, {count, columns, tier.format[1].dim}, Lay::kRows);
  const Integers named = integers_of(names), first = integers_of(starts);
  Fresh fresh{Vectors(keys), Vectors(values), nullptr, {}};
  const size_t wanted = size_t(tier.score >= 0) + size_t(tier.position >= 0);
  if (beside.size() != wanted)
    refuse("beside has ", beside.size(), " tensors; pages store ", wanted,
           " of scores and positions, and need as many");
  for (const auto& [label, other] : {std::pair{Label{"table"}, &tier.table_view},
                                     {Label{"keep"}, &kept},
                                     {Label{"table_rows"}, &names},
                                     {Label{"start"}, &starts},
                                     {Label{"key"}, &keys},
                                     {Label{"value"}, &values}})
    check_apart(pages, {"page data"}, *other, label);
  check_distinct(tier, named, count);
  size_t at = 0;
  if (tier.score >= 0) {
    const View scores =
        view(beside[at++], {"scores"}, kFloat32, {count, columns}, Lay::kContiguous);
    check_apart(pages, {"page data"}, scores, {"scores"});
    fresh.score = scores.as<const float>();
  }
  if (tier.position >= 0) {
    const View positions =
        view(beside[at], {"positions"}, kIntegers, {count, columns}, Lay::kContiguous);
    check_apart(pages, {"page data"}, positions, {"positions"});
    fresh.position = integers_of(positions);
  }
  const std::vector<Share> shares = shares_of(tier, marks, named, first);
  for (int64_t i = 0; fresh.position.wide && i < count; ++i)
    for (int64_t k = 0; k < columns; ++k)
      if (marks.of(i)[k])
        within({"a position"}, fresh.position[i * columns + k], INT32_MIN, INT32_MAX);
  const Writer writer(tier, coder, fresh, columns);
  for_shares(shares, marks,
             [&](const Share& share) { writer.write(share, marks, named[share.i]); });
}

// Moves the marked rows stay [S, L] of table rows[i] to the front: the first past the new end moves
// to the first gap before it.
void page_compact(Tensor data, Tensor table, std::vector<int64_t> numbers, Tensor table_rows,
                  Tensor stay) {
  const View pages = pages_of(data, Use::kWrites);
  const Tier tier = tier_of(pages, table, numbers);
  const View staying = view(stay, {"stay"}, kMarks, {kAny, kAny}, Lay::kContiguous);
  const int64_t count = staying.size(0), columns = staying.size(1);
  const auto* marks = staying.as<const uint8_t>();
  const View names = table_rows_of(tier, table_rows, count);
  const Integers named = integers_of(names);
  check_distinct(tier, named, count);
  check_apart(pages, {"page data"}, tier.table_view, {"table"});
  check_apart(pages, {"page data"}, names, {"table_rows"});
  check_apart(pages, {"page data"}, staying, {"stay"});
  std::vector<int64_t> after(count);
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* stays = marks + i * columns;
    int64_t end = columns;
    while (end > 0 && !stays[end - 1]) --end;
    tier.check(named[i], 0, end);
    for (int64_t slot = 0; slot < end; ++slot) after[i] += stays[slot] != 0;
  }
  for_all(count, grain(kWorth, columns), [&](int64_t i) {
    const uint8_t* stays = marks + i * columns;
    const int64_t table_row = named[i];
    int64_t gap = 0;
    for (int64_t slot = after[i]; slot < columns; ++slot) {
      if (!stays[slot]) continue;
      while (stays[gap]) ++gap;  // there are as many gaps before the end as rows past it
      tier.move(tier.page(table_row, slot), slot % tier.tokens, tier.page(table_row, gap),
                gap % tier.tokens);
      ++gap;
    }
  });
}

// Copies whole pages; no target may be a source, or be named twice.
void page_copy(Tensor data, Tensor source, Tensor target) {
  const View pages =
      view(data, {"page data"}, kBytes, {kMany, kAny}, Lay::kContiguous, Use::kWrites);
  const View sources = view(source, {"source"}, kIntegers, {kAny}, Lay::kContiguous);
  const int64_t count = sources.size(0), there = pages.size(0), bytes = pages.size(1);
  const View targets = view(target, {"target"}, kIntegers, {count}, Lay::kContiguous);
  const Integers from = integers_of(sources), to = integers_of(targets);
  check_apart(pages, {"page data"}, sources, {"source"});
  check_apart(pages, {"page data"}, targets, {"target"});
  PageSet written(there, count);
  for (int64_t i = 0; i < count; ++i) {
    if (from[i] < 0 || from[i] >= there || to[i] < 0 || to[i] >= there)
      refuse("page ", from[i], " is to be copied to page ", to[i], "; there are ", there);
    if (!written.add(to[i])) refuse("page ", to[i], " is written twice; name each target once");
  }
  for (int64_t i = 0; i < count; ++i)
    if (written.has(from[i]) && from[i] != to[i])
      refuse("page ", from[i], " is read and written; no target may be a source");
  uint8_t* first = pages.data;
  for_all(count, grain(1 << 16, bytes), [&](int64_t i) {
    std::memmove(first + to[i] * bytes, first + from[i] * bytes, bytes);
  });
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def(
      "page_write(Tensor(a!) data, Tensor table, int[] tier, Tensor table_rows, Tensor start, "
      "Tensor keep, Tensor key, Tensor value, Tensor[] beside, str isa) -> ()");
  m.def(
      "page_compact(Tensor(a!) data, Tensor table, int[] tier, Tensor table_rows, Tensor stay) -> "
      "()");
  m.def("page_copy(Tensor(a!) data, Tensor source, Tensor target) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) {
  m.impl("page_write", KV_BOX(&kv::page_write));
  m.impl("page_compact", KV_BOX(&kv::page_compact));
  m.impl("page_copy", KV_BOX(&kv::page_copy));
}
