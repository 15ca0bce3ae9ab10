// An operator that encodes stored tokens in another format: a few at a time are decoded to registers
// and written, so no tensor has their numbers.
#include <cstring>
#include <utility>

#include "boundary.h"
#include "marked.h"
#include "name.h"
#include "page_set.h"

namespace kv {
namespace {

// Encodes tokens of one tier in the pages of another.
class Recoder {
 public:
  Recoder(const Tier& source, const Tier& tier, const Coder& coder)
      : source_(source), tier_(tier), coder_(coder) {}

  // Writes consecutive tokens of a page from `slot` on, those in some slots of a source's table row.
  void write(int64_t source_row, int64_t table_row, int64_t slot, const int64_t* kept,
             int count) const {
    uint8_t *page = tier_.page(table_row, slot), *from[kRun];
    const int64_t row = slot % tier_.tokens;
    int64_t at[kRun];
    for (int k = 0; k < count; ++k) {
      const bool next = k > 0 && kept[k] == kept[k - 1] + 1 && at[k - 1] + 1 < source_.tokens;
      from[k] = next ? from[k - 1] : source_.page(source_row, kept[k]);
      at[k] = next ? at[k - 1] + 1 : kept[k] % source_.tokens;
    }
    const uint8_t *codes[kRun], *meta[kRun];
    for (int which = 0; which < 2; ++which) {
      for (int k = 0; k < count; ++k) {
        codes[k] = source_.codes_at(which, from[k], at[k]);
        meta[k] = source_.meta_at(which, from[k], at[k]);
      }
      coder_.recode(source_.format[which], codes, meta, tier_.format[which], count,
                    tier_.codes_at(which, page, row), tier_.meta_at(which, page, row));
    }
    for (const auto& [offset, to] : {std::pair{source_.score, tier_.score},
                                     std::pair{source_.position, tier_.position}})
      for (int k = 0; to >= 0 && k < count; ++k)
        std::memcpy(page + to + 4 * (row + k), from[k] + offset + 4 * at[k], 4);
  }

 private:
  const Tier &source_, &tier_;
  const Coder& coder_;
};

// Raises if a page is read and written.
void check_pages(const Tier& source, const Tier& tier, const std::vector<Share>& shares,
                 const Marks& marks, const Integers& source_rows, const Integers& table_rows) {
  const int64_t widest = std::max(source.pages_view.size(1), tier.pages_view.size(1));
  if (source.data != tier.data || source.step != tier.step || tier.step < widest) {
    check_apart(tier.pages_view, {"page data"}, source.pages_view, {"source data"});
    return;
  }
  int64_t most = 0;
  for (const Share& share : shares)
    over_runs(tier, marks, share, [&](int64_t, const int64_t*, int) { ++most; });
  // The source may have further pages of the same memory.
  PageSet written(std::max(source.pages_view.size(0), tier.pages_view.size(0)), most);
  for (const Share& share : shares)
    over_runs(tier, marks, share, [&](int64_t slot, const int64_t*, int) {
      written.add(tier.table[tier.entry(table_rows[share.i], slot / tier.tokens)]);
    });
  for (const Share& share : shares)
    for (int64_t token = share.first; token < share.last; ++token) {
      if (!marks.of(share.i)[token]) continue;
      const int64_t page =
          source.table[source.entry(source_rows[share.i], token / source.tokens)];
      if (written.has(page))
        refuse("page ", page, " is read and written; tokens are encoded in other pages");
    }
}

// Encodes the tokens in the marked slots keep [S, L] of the source's rows source_rows[i], and writes
// them to the slots of table rows[i] from start[i], with their scores and positions.
void page_recode(Tensor data, Tensor table, std::vector<int64_t> numbers, Tensor table_rows,
                 Tensor start, Tensor keep, Tensor source_data, Tensor source_table,
                 std::vector<int64_t> source_numbers, Tensor source_rows, Name isa) {
  const Coder& coder = coder_of(isa);
  const View pages = pages_of(data, Use::kWrites);
  const Tier tier = tier_of(pages, table, numbers);
  const Tier source = tier_of(pages_of(source_data, Use::kReads), source_table, source_numbers);
  for (int which = 0; which < 2; ++which)
    if (source.format[which].dim != tier.format[which].dim)
      refuse(which ? "values" : "keys", " have ", source.format[which].dim,
             " dimensions in the source, and ", tier.format[which].dim,
             " in the pages; both must be equal");
  if ((tier.score >= 0 && source.score < 0) || (tier.position >= 0 && source.position < 0))
    refuse("pages store scores or positions that the source does not; it must store both");
  const View kept = view(keep, {"keep"}, kMarks, {kAny, kAny}, Lay::kContiguous);
  const Marks marks(kept);
  const View names = table_rows_of(tier, table_rows, marks.count);
  const View others = table_rows_of(source, source_rows, marks.count);
  const View starts = view(start, {"start"}, kIntegers, {marks.count}, Lay::kContiguous);
  for (const auto& [label, other] : {std::pair{Label{"table"}, &tier.table_view},
                                     {Label{"source table"}, &source.table_view},
                                     {Label{"keep"}, &kept},
                                     {Label{"table_rows"}, &names},
                                     {Label{"source_rows"}, &others},
                                     {Label{"start"}, &starts}})
    check_apart(pages, {"page data"}, *other, label);
  const Integers named = integers_of(names), from = integers_of(others);
  check_distinct(tier, named, marks.count);
  for (int64_t i = 0; i < marks.count; ++i) {
    int64_t end = marks.columns;
    while (end > 0 && !marks.of(i)[end - 1]) --end;
    source.check(from[i], 0, end);
  }
  const std::vector<Share> shares = shares_of(tier, marks, named, integers_of(starts));
  check_pages(source, tier, shares, marks, from, named);
  const Recoder recoder(source, tier, coder);
  for_shares(shares, marks, [&](const Share& share) {
    over_runs(tier, marks, share, [&](int64_t slot, const int64_t* kept, int count) {
      recoder.write(from[share.i], named[share.i], slot, kept, count);
    });
  });
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def(
      "page_recode(Tensor(a!) data, Tensor table, int[] tier, Tensor table_rows, Tensor start, "
      "Tensor keep, Tensor source_data, Tensor source_table, int[] source_tier, "
      "Tensor source_rows, str isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) { m.impl("page_recode", KV_BOX(&kv::page_recode)); }
