// Operators that read tokens from pages, and that update scores.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "boundary.h"
#include "name.h"
#include "pages.h"

namespace kv {
namespace {

constexpr int64_t kWorth = 1 << 15;  // bytes to read or write that justify another thread
constexpr int64_t kAhead = 8;        // pages
constexpr int64_t kLine = 64;        // bytes of a cache line

template <typename T>
T load(const void* from) {
  T x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// Bytes first .. last - 1 of a page.
struct Span {
  int64_t first, last;
};

Span scores_of(const Tier& tier) { return {tier.score, tier.score + 4 * tier.tokens}; }

// The bytes of scores and positions, if the pages store them; else one byte.
Span notes_of(const Tier& tier) {
  const auto [first, last] = std::minmax(tier.score, tier.position);
  if (last < 0) return {0, 1};
  return {first < 0 ? last : first, last + 4 * tier.tokens};
}

// Some table rows of a tier, and the slots to read in each: up to `slots`, from start[i] on if that is
// given.
struct Chosen {
  Chosen(const Tier& of, const Tensor& length, const Tensor& table_rows, int64_t slots,
         const Tensor* start = nullptr)
      : tier(of),
        named(table_rows_of(tier, table_rows, kAny)),
        lengths(view(length, {"length"}, kIntegers, {tier.table_rows}, Lay::kContiguous)),
        count(named.size(0)) {
    const Integers all = integers_of(lengths), which = integers_of(named);
    Integers starts;
    if (start) starts = integers_of(view(*start, {"start"}, kIntegers, {count}, Lay::kContiguous));
    for (int64_t i = 0; i < count; ++i) {
      table_row.push_back(which[i]);
      const int64_t there = all[table_row[i]];
      if (there < 0) refuse("a table row has ", there, " tokens; it must have 0 or more");
      first.push_back(start ? within({"start"}, starts[i], 0, kMost) : 0);
      held.push_back(std::clamp<int64_t>(there - first[i], 0, slots));
      tier.check(table_row[i], first[i], first[i] + held[i]);
    }
  }

  // Raises if scores would overwrite arguments.
  void check_writes() const {
    check_distinct(tier, integers_of(named), count);
    check_apart(tier.pages_view, {"page data"}, tier.table_view, {"table"});
    check_apart(tier.pages_view, {"page data"}, named, {"table_rows"});
    check_apart(tier.pages_view, {"page data"}, lengths, {"length"});
  }

  // f(page, row in it, slot from the first on, count of the slots from there in that page) over the
  // held slots of table rows[i]. Pages are scattered, so those needed next are prefetched.
  template <typename F>
  void over_pages(int64_t i, Span span, const F& f) const {
    const int64_t end = first[i] + held[i];
    for (int64_t slot = first[i], more; slot < end; slot += more) {
      const int64_t row = slot % tier.tokens, later = slot + kAhead * tier.tokens;
      more = std::min(tier.tokens - row, end - slot);
      if (later < end) {
        const uint8_t* page = tier.page(table_row[i], later);
        for (int64_t at = span.first; at < span.last; at += kLine) __builtin_prefetch(page + at);
        __builtin_prefetch(page + span.last - 1);
      }
      f(tier.page(table_row[i], slot), row, slot - first[i], more);
    }
  }

  const Tier tier;
  const View named, lengths;
  const int64_t count;
  std::vector<int64_t> table_row, first, held;
};

// The requested number of slots, which the table must cover.
int64_t slots_of(const Tier& tier, int64_t slots) {
  return within({"slots"}, slots, 0, tier.room());
}

ScalarType type_of(const Format& format) {
  if (format.number == Number::kFloat16) return ScalarType::Half;
  return format.number == Number::kBFloat16 ? ScalarType::BFloat16 : ScalarType::Float;
}

// Vectors [n, slots, D], zeros in empty slots: plain numbers unchanged, codes in float32.
Tensor read_vectors(const Chosen& chosen, const Coder& coder, int which, const Tensor& like,
                    int64_t slots) {
  const Format& format = chosen.tier.format[which];
  Tensor out =
      torch::stable::new_empty(like, {chosen.count, slots, format.dim}, type_of(format));
  const int64_t width = format.dim * int64_t(out.element_size());
  auto* first = static_cast<uint8_t*>(out.mutable_data_ptr());
  for_all(chosen.count, grain(kWorth, product(slots, width)), [&](int64_t i) {
    uint8_t* to = first + i * slots * width;
    const int64_t codes = chosen.tier.code[which];
    const Span span{codes, codes + 1};
    chosen.over_pages(i, span, [&](uint8_t* page, int64_t row, int64_t slot, int64_t tokens) {
      for (int64_t k = 0; k < tokens; ++k) {
        uint8_t* at = to + (slot + k) * width;
        if (format.number == Number::kCodes)
          chosen.tier.decode(coder, which, page, row + k, reinterpret_cast<float*>(at));
        else
          std::memcpy(at, page + codes + (row + k) * width, width);
      }
    });
    const int64_t held = chosen.held[i];
    std::fill(to + held * width, to + slots * width, uint8_t(0));
  });
  return out;
}

// The slots of table rows from start[i] on: whether they hold a token (bool), then scores (float32, else 0)
// and positions (int64, else -1) if pages store them, then keys and values if requested.
std::vector<Tensor> page_read(Tensor data, Tensor table, std::vector<int64_t> numbers,
                              Tensor length, Tensor table_rows, Tensor start,
                              int64_t slots, bool keys, bool values, Name isa) {
  const Coder& coder = coder_of(isa);
  const Tier tier = tier_of(pages_of(data, Use::kReads), table, numbers);
  const Chosen chosen(tier, length, table_rows, slots_of(tier, slots), &start);
  std::vector<Tensor> found;
  auto made = [&](ScalarType type) {
    found.push_back(torch::stable::new_empty(data, {chosen.count, slots}, type));
    return found.back().mutable_data_ptr();
  };
  auto* held = static_cast<bool*>(made(ScalarType::Bool));
  auto* score = tier.score < 0 ? nullptr : static_cast<float*>(made(ScalarType::Float));
  auto* position = tier.position < 0 ? nullptr : static_cast<int64_t*>(made(ScalarType::Long));
  for_all(chosen.count, grain(kWorth, product(16, slots)), [&](int64_t i) {
    const int64_t at = i * slots, end = at + chosen.held[i], stop = at + slots;
    std::fill(held + at, held + end, true);
    std::fill(held + end, held + stop, false);
    chosen.over_pages(i, notes_of(tier), [&](const uint8_t* page, int64_t row, int64_t slot,
                                             int64_t tokens) {
      if (score) std::memcpy(score + at + slot, page + tier.score + 4 * row, 4 * tokens);
      if (!position) return;
      for (int64_t k = 0; k < tokens; ++k)
        position[at + slot + k] = load<int32_t>(page + tier.position + 4 * (row + k));
    });
    if (score) std::fill(score + end, score + stop, 0.0f);
    if (position) std::fill(position + end, position + stop, int64_t(-1));
  });
  if (keys) found.push_back(read_vectors(chosen, coder, 0, data, slots));
  if (values) found.push_back(read_vectors(chosen, coder, 1, data, slots));
  return found;
}

// Whether scores are all at least `least`, none NaN. Without branches, so that compilers vectorize
// the loop.
bool none_below(const uint8_t* scores, int64_t count, float least) {
  int32_t below = 0;
  for (int64_t row = 0; row < count; ++row)
    below |= -int32_t(!(load<float>(scores + 4 * row) >= least));
  return !below;
}

// The lowest score of each table row and its slot, the first on a tie, of tokens at positions
// before `until`, which is empty for no bound. Without a token: infinity and -1. NaN is the lowest.
std::vector<Tensor> page_weakest(Tensor data, Tensor table, std::vector<int64_t> numbers,
                                 Tensor length, Tensor table_rows, int64_t slots, Tensor until) {
  const Tier tier = tier_of(pages_of(data, Use::kReads), table, numbers);
  const Chosen chosen(tier, length, table_rows, slots_of(tier, slots));
  const View bounds = view(until, {"until"}, kIntegers, {kAny}, Lay::kContiguous);
  const bool bounded = bounds.size(0) > 0;
  if (bounded && bounds.size(0) != chosen.count)
    refuse("until has ", bounds.size(0), " positions for ", chosen.count,
           " table rows; give one for each, or none");
  if (tier.score < 0) refuse("pages store no scores, and the lowest is requested");
  if (bounded && tier.position < 0) refuse("pages store no positions, which until needs");
  const Integers bound = integers_of(bounds);
  std::vector<Tensor> found{torch::stable::new_empty(data, {chosen.count}, ScalarType::Float),
                            torch::stable::new_empty(data, {chosen.count}, ScalarType::Long)};
  auto* lowest = static_cast<float*>(found[0].mutable_data_ptr());
  auto* where = static_cast<int64_t*>(found[1].mutable_data_ptr());
  for_all(chosen.count, grain(kWorth, product(8, slots)), [&](int64_t i) {
    float least = INFINITY;
    int64_t at = -1;
    chosen.over_pages(i, scores_of(tier), [&](const uint8_t* page, int64_t, int64_t slot,
                                              int64_t tokens) {
      if (at >= 0 && none_below(page + tier.score, tokens, least)) return;
      for (int64_t row = 0; row < tokens; ++row) {
        const float score = load<float>(page + tier.score + 4 * row);
        if (at >= 0 && (score >= least || std::isnan(least))) continue;
        if (bounded && load<int32_t>(page + tier.position + 4 * row) >= bound[i]) continue;
        least = score, at = slot + row;
      }
    });
    lowest[i] = least, where[i] = at;
  });
  return found;
}

// Writes score [n, L] to the slots of the pages of table rows, and 0 past the L-th.
void page_rescore(Tensor data, Tensor table, std::vector<int64_t> numbers, Tensor length,
                  Tensor table_rows, Tensor score) {
  const Tier tier = tier_of(pages_of(data, Use::kWrites), table, numbers);
  const Chosen chosen(tier, length, table_rows, INT64_MAX);
  if (tier.score < 0) refuse("pages store no scores, and new ones are given");
  const View scores =
      view(score, {"score"}, kFloat32, {chosen.count, kAny}, Lay::kContiguous);
  const int64_t slots = scores.size(1);
  const auto* given = scores.as<const float>();
  chosen.check_writes();
  check_apart(tier.pages_view, {"page data"}, scores, {"score"});
  for_all(chosen.count, grain(kWorth, product(8, slots)), [&](int64_t i) {
    chosen.over_pages(i, scores_of(tier), [&](uint8_t* page, int64_t, int64_t slot, int64_t) {
      const int64_t known = std::clamp<int64_t>(slots - slot, 0, tier.tokens);
      if (known) std::memcpy(page + tier.score, given + i * slots + slot, 4 * known);
      std::memset(page + tier.score + 4 * known, 0, 4 * (tier.tokens - known));
    });
  });
}

// Adds to the scores of a page's tokens; an empty slot keeps its score. Without branches, so that
// compilers vectorize the loop.
void add(uint8_t* scores, const uint8_t* positions, const float* given, float over, int64_t held) {
  for (int64_t row = 0; row < held; ++row) {
    const auto old = load<float>(scores + 4 * row);
    const float sum = old + given[row] / over;
    const float next = load<int32_t>(positions + 4 * row) < 0 ? old : sum;
    std::memcpy(scores + 4 * row, &next, 4);
  }
}

// Updates the scores of the slots: mass [n, L] is the attention mass of a pass, seen the number of
// its queries that counted, and before [n] the number of tokens before it, -1 for a table row that
// is skipped. Scores are sums of mass / `over`, or, if that is 0, means over queries: then a
// token's past counts as at most `last` queries; -1: without limit. Past the end of a table row its
// last page has zeros, as after page_rescore.
void page_accumulate(Tensor data, Tensor table, std::vector<int64_t> numbers, Tensor length,
                     Tensor table_rows, Tensor before, Tensor mass, Tensor seen, int64_t last,
                     int64_t over) {
  const Tier tier = tier_of(pages_of(data, Use::kWrites), table, numbers);
  const Chosen chosen(tier, length, table_rows, INT64_MAX);
  if (tier.score < 0 || tier.position < 0)
    refuse("pages store no scores or no positions; updating scores needs both");
  const View masses = view(mass, {"mass"}, kFloat32, {chosen.count, kAny}, Lay::kContiguous);
  const int64_t slots = masses.size(1);
  const View counts = view(seen, {"seen"}, kIntegers, {chosen.count, slots}, Lay::kContiguous);
  const View befores = view(before, {"before"}, kIntegers, {chosen.count}, Lay::kContiguous);
  for (int64_t held : chosen.held)
    if (held > slots)
      refuse("a table row has ", held, " tokens and mass covers ", slots,
             "; it must cover all of them");
  within({"last"}, last, -1, INT64_MAX);
  within({"over"}, over, 0, INT64_MAX);
  chosen.check_writes();
  check_apart(tier.pages_view, {"page data"}, masses, {"mass"});
  check_apart(tier.pages_view, {"page data"}, counts, {"seen"});
  check_apart(tier.pages_view, {"page data"}, befores, {"before"});
  const auto* given = masses.as<const float>();
  const Integers counted = integers_of(counts), tokens = integers_of(befores);
  const int64_t most = last < 0 ? INT64_MAX : last;
  for_all(chosen.count, grain(kWorth, product(20, slots)), [&](int64_t i) {
    chosen.over_pages(i, notes_of(tier), [&](uint8_t* page, int64_t, int64_t slot, int64_t held) {
      const int64_t at = i * slots + slot;
      std::memset(page + tier.score + 4 * held, 0, 4 * (tier.tokens - held));
      if (tokens[i] < 0) return;
      if (over > 0) {
        add(page + tier.score, page + tier.position, given + at, float(over), held);
        return;
      }
      for (int64_t row = 0; row < held; ++row) {
        const int64_t position = load<int32_t>(page + tier.position + 4 * row);
        if (position < 0) continue;
        uint8_t* score = page + tier.score + 4 * row;
        const auto past = float(std::clamp<int64_t>(tokens[i] - 1 - position, 0, most));
        const float queries = std::max(past + float(counted[at + row]), 1.0f);
        const float mean = (load<float>(score) * past + given[at + row]) / queries;
        std::memcpy(score, &mean, 4);
      }
    });
  });
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def(
      "page_read(Tensor data, Tensor table, int[] tier, Tensor length, Tensor table_rows, "
      "Tensor start, int slots, bool keys, bool values, str isa) -> Tensor[]");
  m.def(
      "page_weakest(Tensor data, Tensor table, int[] tier, Tensor length, Tensor table_rows, "
      "int slots, Tensor until) -> Tensor[]");
  m.def(
      "page_rescore(Tensor(a!) data, Tensor table, int[] tier, Tensor length, Tensor table_rows, "
      "Tensor score) -> ()");
  m.def(
      "page_accumulate(Tensor(a!) data, Tensor table, int[] tier, Tensor length, Tensor "
      "table_rows, "
      "Tensor before, Tensor mass, Tensor seen, int last, int over) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) {
  m.impl("page_read", KV_BOX(&kv::page_read));
  m.impl("page_weakest", KV_BOX(&kv::page_weakest));
  m.impl("page_rescore", KV_BOX(&kv::page_rescore));
  m.impl("page_accumulate", KV_BOX(&kv::page_accumulate));
}
