#include "pages.h"

#include "marked.h"

namespace kv {

const Coder& coder_of(const Name& isa) {
  kernels_of(isa);
  return *coder(isa.text.c_str());
}

const Coder* coder(const char* isa) {
  if (!kernels(isa)) return nullptr;
  const int level = level_of(isa);
  if (level == 0) return &plain_coder;
#ifdef KV_X86
  // Extensions after AVX-512 have no use here.
  return level == 1 ? &avx2_coder : &avx512_coder;
#else
  return &plain_coder;  // which has NEON already, if the processor has it
#endif
}

View pages_of(const Tensor& data, Use use) {
  const View pages = view(data, {"page data"}, kBytes, {kMany, kAny}, Lay::kRows, use);
  if (use == Use::kWrites && pages.size(0) > 1 && pages.strides[0] < pages.size(1))
    refuse("page data has ", pages.size(1), " bytes per page and a stride of ",
           pages.strides[0], "; pages that are written must not overlap");
  return pages;
}

Tier tier_of(const View& pages, const Tensor& table, const int64_t* numbers) {
  Tier tier = tier_of(pages, numbers);
  tier.table_view = view(table, {"table"}, kIntegers, {kAny, kAny}, Lay::kContiguous);
  tier.table_rows = tier.table_view.size(0), tier.width = tier.table_view.size(1);
  tier.table = integers_of(tier.table_view);
  return tier;
}

Tier tier_of(const View& pages, const int64_t* numbers) {
  Tier tier;
  tier.pages_view = pages;
  tier.data = pages.data, tier.pages = pages.size(0), tier.step = pages.strides[0];
  tier.tokens = within({"tokens of a page"}, numbers[0], 1, kMost);
  const int64_t bytes = pages.size(1);
  tier.score = within({"offset of scores"}, numbers[5], -1, bytes);
  tier.position = within({"offset of positions"}, numbers[6], -1, bytes);
  tier.reverse = within({"direction of a table"}, numbers[7], 0, 1) != 0;
  auto add = [&](Label label, int64_t offset, int64_t width) {
    check_rows(label, offset, tier.tokens, width, bytes);
    const int64_t end = offset + tier.tokens * width;
    for (int i = 0; i < tier.segments; ++i) {
      const auto [first, other] = tier.segment[i];
      if (offset < first + tier.tokens * other && first < end)
        refuse(label, " is ", offset, ", up to ", end, "; from ", first, " to ",
               first + tier.tokens * other, " the page has another field");
    }
    tier.segment[tier.segments++] = {offset, width};
  };
  const int64_t* levels = numbers + kTierNumbers;
  for (int which = 0; which < 2; ++which) {
    const int64_t* given = numbers + 8 + 4 * which;
    const Format& format = tier.format[which] =
        format_of({which ? "values" : "keys"}, given, levels);
    levels += levels_of(given);
    add({which ? "offset of values" : "offset of keys"}, tier.code[which] = numbers[1 + 2 * which],
        format.bytes());
    tier.meta[which] = format.groups ? numbers[2 + 2 * which] : 0;
    if (format.groups)
      add({which ? "offset of scales of values" : "offset of scales of keys"}, tier.meta[which],
          format.meta_bytes());
  }
  if (tier.score >= 0) add({"offset of scores"}, tier.score, 4);
  if (tier.position >= 0) add({"offset of positions"}, tier.position, 4);
  return tier;
}

int64_t tier_size(const int64_t* numbers, int64_t left) {
  if (left < kTierNumbers) return kTierNumbers;
  return kTierNumbers + levels_of(numbers + 8) + levels_of(numbers + 12);
}

namespace {

void check_size(const std::vector<int64_t>& numbers) {
  const auto given = int64_t(numbers.size()), needed = tier_size(numbers.data(), given);
  if (given != needed) refuse("a tier has ", given, " numbers; it must have ", needed);
}

}  // namespace

Tier tier_of(const View& pages, const Tensor& table, const std::vector<int64_t>& numbers) {
  check_size(numbers);
  return tier_of(pages, table, numbers.data());
}

Tier tier_of(const View& pages, const std::vector<int64_t>& numbers) {
  check_size(numbers);
  return tier_of(pages, numbers.data());
}

View table_rows_of(const Tier& tier, const Tensor& table_rows, int64_t count) {
  const View found = view(table_rows, {"table_rows"}, kIntegers, {count}, Lay::kContiguous);
  const Integers named = integers_of(found);
  for (int64_t i = 0; i < found.size(0); ++i) tier.check_table_row(named[i]);
  return found;
}

void check_distinct(const Tier& tier, const Integers& table_rows, int64_t count) {
  bool ascending = true;
  for (int64_t i = 1; i < count; ++i) ascending &= table_rows[i - 1] < table_rows[i];
  if (ascending) return;
  std::vector<bool> named(tier.table_rows);
  for (int64_t i = 0; i < count; ++i) {
    if (named[table_rows[i]])
      refuse("table row ", table_rows[i], " is named twice; name each written table row once");
    named[table_rows[i]] = true;
  }
}

void Tier::check_page(int64_t page) const {
  if (page < 0 || page >= pages)
    refuse("a table names page ", page, "; its pool has ", pages, " pages");
}

void Tier::check_table_row(int64_t table_row) const {
  if (table_row < 0 || table_row >= table_rows)
    refuse("table row ", table_row, " does not exist; there are ", table_rows);
}

void Tier::check(int64_t table_row, int64_t first, int64_t last) const {
  check_table_row(table_row);
  if (first >= last) return;
  if (first < 0 || last > room())
    refuse("a table row has slots ", first, " to ", last - 1,
           "; its table covers 0 to ", room() - 1);
  for (int64_t column = first / tokens; column <= (last - 1) / tokens; ++column)
    check_page(table[entry(table_row, column)]);
}

void Tier::move(uint8_t* from, int64_t row, uint8_t* to, int64_t target) const {
  for (int i = 0; i < segments; ++i) {
    const auto [offset, width] = segment[i];
    std::memmove(to + offset + target * width, from + offset + row * width, width);
  }
}

void Tier::decode(const Coder& coder, int which, uint8_t* page, int64_t row, float* to) const {
  coder.decode(format[which], codes_at(which, page, row), meta_at(which, page, row), to);
}

void Tier::encode(const Coder& coder, int which, Number from, const uint8_t* const* x, int count,
                  uint8_t* page, int64_t row) const {
  coder.encode(format[which], from, x, count, codes_at(which, page, row), meta_at(which, page, row));
}

std::vector<Share> shares_of(const Tier& tier, const Marks& marks, const Integers& table_rows,
                             const Integers& start) {
  std::vector<Share> shares;
  for (int64_t i = 0; i < marks.count; ++i) {
    const uint8_t *mine = marks.of(i), *end = mine + marks.columns;
    // A table row without kept tokens needs no slots, and its start may be -1.
    if (std::none_of(mine, end, [](uint8_t mark) { return mark != 0; })) continue;
    int64_t slot = within({"start"}, start[i], 0, tier.room());
    for (int64_t token = 0; token < marks.columns; token += kShare) {
      const int64_t last = std::min(token + kShare, marks.columns);
      int64_t more = 0;
      for (int64_t k = token; k < last; ++k) more += mine[k] != 0;
      if (more) shares.push_back({i, token, last, slot});
      slot += more;
    }
    tier.check(table_rows[i], start[i], slot);
  }
  return shares;
}

}  // namespace kv
