// What reads tokens from pages, and what gives them new scores.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "name.h"
#include "pages.h"

namespace kv {
namespace {

constexpr int64_t kWorth = 1 << 15;  // bytes to read or write that are worth another thread
constexpr int64_t kAhead = 8;        // pages
constexpr int64_t kLine = 64;        // bytes that memory gives at once

template <typename T>
T load(const void* from) {
  T x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// Bytes of a page, from the first to before the last.
struct Span {
  int64_t first, last;
};

Span scores_of(const Tier& tier) { return {tier.score, tier.score + 4 * tier.tokens}; }

// Scores and positions, those of them that the pages have; else one byte.
Span notes_of(const Tier& tier) {
  const auto [first, last] = std::minmax(tier.score, tier.position);
  if (last < 0) return {0, 1};
  return {first < 0 ? last : first, last + 4 * tier.tokens};
}

// Some streams of a tier, and how many of their first slots are looked at.
struct Chosen {
  Chosen(const Tensor& data, const Tensor& table, const std::vector<int64_t>& numbers,
         const Tensor& length, const Tensor& streams, int64_t slots)
      : tier(tier_of(data, table, numbers.data())), count(streams.numel()) {
    const Integers named = integers_of(streams, count, "streams");
    const Integers lengths = integers_of(length, tier.streams, "lengths");
    for (int64_t i = 0; i < count; ++i) {
      tier.check_stream(named[i]);
      const int64_t all = lengths[named[i]];
      STD_TORCH_CHECK(all >= 0 && slots >= 0, "a stream has ", all, " tokens, and ", slots,
                      " are asked for");
      held.push_back(std::min(all, slots));
      stream.push_back(named[i]);
      tier.check(stream[i], 0, held[i]);
    }
  }

  // f(page, slot, count of the slots from there in that page) over the held slots of streams[i].
  // Pages lie anywhere, so what will be looked at in those to come is asked for early.
  template <typename F>
  void over_pages(int64_t i, Span span, const F& f) const {
    for (int64_t slot = 0; slot < held[i]; slot += tier.tokens) {
      const int64_t later = slot + kAhead * tier.tokens;
      if (later < held[i]) {
        const uint8_t* page = tier.page(stream[i], later);
        for (int64_t at = span.first; at < span.last; at += kLine) __builtin_prefetch(page + at);
        __builtin_prefetch(page + span.last - 1);
      }
      f(tier.page(stream[i], slot), slot, std::min(tier.tokens, held[i] - slot));
    }
  }

  const Tier tier;
  const int64_t count;
  std::vector<int64_t> stream, held;
};

ScalarType type_of(const Format& format) {
  if (format.number == Number::kFloat16) return ScalarType::Half;
  return format.number == Number::kBFloat16 ? ScalarType::BFloat16 : ScalarType::Float;
}

// Vectors [n, slots, D], zeros where no token is held: plain numbers as they are, codes in float32.
Tensor read_vectors(const Chosen& chosen, const Coder& coder, int which, const Tensor& like,
                    int64_t slots) {
  const Format& format = chosen.tier.format[which];
  Tensor out =
      torch::stable::new_empty(like, {chosen.count, slots, format.dim}, type_of(format));
  const int64_t width = format.dim * int64_t(out.element_size());
  auto* first = static_cast<uint8_t*>(out.mutable_data_ptr());
  for_all(chosen.count, kWorth / (slots * width + 1), [&](int64_t i) {
    uint8_t* to = first + i * slots * width;
    const int64_t codes = chosen.tier.code[which];
    const Span span{codes, codes + 1};
    chosen.over_pages(i, span, [&](const uint8_t* page, int64_t slot, int64_t tokens) {
      for (int64_t row = 0; row < tokens; ++row) {
        uint8_t* at = to + (slot + row) * width;
        if (format.number == Number::kCodes)
          chosen.tier.decode(coder, which, page, row, reinterpret_cast<float*>(at));
        else
          std::memcpy(at, page + codes + row * width, width);
      }
    });
    const int64_t held = chosen.held[i];
    std::fill(to + held * width, to + slots * width, uint8_t(0));
  });
  return out;
}

// What streams hold in their first slots: whether they do (bool), then scores (float32, else 0) and
// positions (int64, else -1) where pages have them, then keys and values if asked for.
std::vector<Tensor> page_read(Tensor data, Tensor table, std::vector<int64_t> numbers,
                              Tensor length, Tensor streams, int64_t slots, bool keys, bool values,
                              Name isa) {
  STD_TORCH_CHECK(numbers.size() == kTierNumbers, "a tier has ", kTierNumbers, " numbers");
  const Chosen chosen(data, table, numbers, length, streams, slots);
  const Coder& coder = coder_of(isa.text);
  const Tier& tier = chosen.tier;
  std::vector<Tensor> found;
  auto made = [&](ScalarType type) {
    found.push_back(torch::stable::new_empty(data, {chosen.count, slots}, type));
    return found.back().mutable_data_ptr();
  };
  auto* held = static_cast<bool*>(made(ScalarType::Bool));
  auto* score = tier.score < 0 ? nullptr : static_cast<float*>(made(ScalarType::Float));
  auto* position = tier.position < 0 ? nullptr : static_cast<int64_t*>(made(ScalarType::Long));
  for_all(chosen.count, kWorth / (16 * slots + 1), [&](int64_t i) {
    const int64_t at = i * slots, end = at + chosen.held[i], stop = at + slots;
    std::fill(held + at, held + end, true);
    std::fill(held + end, held + stop, false);
    chosen.over_pages(i, notes_of(tier), [&](const uint8_t* page, int64_t slot, int64_t tokens) {
      if (score) std::memcpy(score + at + slot, page + tier.score, 4 * tokens);
      if (!position) return;
      for (int64_t row = 0; row < tokens; ++row)
        position[at + slot + row] = load<int32_t>(page + tier.position + 4 * row);
    });
    if (score) std::fill(score + end, score + stop, 0.0f);
    if (position) std::fill(position + end, position + stop, int64_t(-1));
  });
  if (keys) found.push_back(read_vectors(chosen, coder, 0, data, slots));
  if (values) found.push_back(read_vectors(chosen, coder, 1, data, slots));
  return found;
}

// The lowest score of each stream and its slot, the first of equal ones, of tokens at positions
// before `until`, which is empty where none is set. No token: infinity and -1. NaN is the lowest.
std::vector<Tensor> page_weakest(Tensor data, Tensor table, std::vector<int64_t> numbers,
                                 Tensor length, Tensor streams, int64_t slots, Tensor until) {
  STD_TORCH_CHECK(numbers.size() == kTierNumbers, "a tier has ", kTierNumbers, " numbers");
  const Chosen chosen(data, table, numbers, length, streams, slots);
  const Tier& tier = chosen.tier;
  const bool bounded = until.numel() > 0;
  STD_TORCH_CHECK(tier.score >= 0 && (!bounded || tier.position >= 0),
                  "pages hold no scores, or no positions");
  const Integers bound = integers_of(until, bounded ? chosen.count : 0, "bounds");
  std::vector<Tensor> found{torch::stable::new_empty(data, {chosen.count}, ScalarType::Float),
                            torch::stable::new_empty(data, {chosen.count}, ScalarType::Long)};
  auto* lowest = static_cast<float*>(found[0].mutable_data_ptr());
  auto* where = static_cast<int64_t*>(found[1].mutable_data_ptr());
  for_all(chosen.count, kWorth / (8 * slots + 1), [&](int64_t i) {
    float least = INFINITY;
    int64_t at = -1;
    chosen.over_pages(i, scores_of(tier), [&](const uint8_t* page, int64_t slot, int64_t tokens) {
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

// Writes score [n, L] over the slots of the pages that streams hold, and 0 past the L-th.
void page_rescore(Tensor data, Tensor table, std::vector<int64_t> numbers, Tensor length,
                  Tensor streams, Tensor score) {
  STD_TORCH_CHECK(numbers.size() == kTierNumbers && score.dim() == 2, "a tier has ", kTierNumbers,
                  " numbers, and scores have two dimensions");
  const int64_t slots = score.size(1);
  const Chosen chosen(data, table, numbers, length, streams, INT64_MAX);
  const Tier& tier = chosen.tier;
  STD_TORCH_CHECK(tier.score >= 0, "pages hold no scores");
  const auto* given =
      data_of<float>(score, ScalarType::Float, chosen.count * slots, "scores");
  for_all(chosen.count, kWorth / (8 * slots + 1), [&](int64_t i) {
    chosen.over_pages(i, scores_of(tier), [&](uint8_t* page, int64_t slot, int64_t) {
      const int64_t known = std::clamp<int64_t>(slots - slot, 0, tier.tokens);
      if (known) std::memcpy(page + tier.score, given + i * slots + slot, 4 * known);
      std::memset(page + tier.score + 4 * known, 0, 4 * (tier.tokens - known));
    });
  });
}

// Adds to the scores of a page's tokens; a place without one keeps its own. Without a branch, so
// that compilers take several at once.
void add(uint8_t* scores, const uint8_t* positions, const float* given, float over, int64_t held) {
  for (int64_t row = 0; row < held; ++row) {
    const auto old = load<float>(scores + 4 * row);
    const float sum = old + given[row] / over;
    const float next = load<int32_t>(positions + 4 * row) < 0 ? old : sum;
    std::memcpy(scores + 4 * row, &next, 4);
  }
}

// Lets the scores of the slots go on: what the queries of a pass gave is mass [n, L], how many of
// them counted is seen, and the tokens that there were before it is before [n], -1 for a stream that
// is left alone. They are sums of mass / `over`, or, where that is 0, means over queries: then a
// token's past counts as at most `last` queries; -1: as all there were.
// Past the end of a stream its last page has zeros, as page_rescore leaves it.
void page_accumulate(Tensor data, Tensor table, std::vector<int64_t> numbers, Tensor length,
                     Tensor streams, Tensor before, Tensor mass, Tensor seen, int64_t last,
                     int64_t over) {
  STD_TORCH_CHECK(numbers.size() == kTierNumbers && mass.dim() == 2, "a tier has ", kTierNumbers,
                  " numbers, and what was given two dimensions");
  const int64_t slots = mass.size(1);
  const Chosen chosen(data, table, numbers, length, streams, slots);
  const Tier& tier = chosen.tier;
  STD_TORCH_CHECK(tier.score >= 0 && tier.position >= 0, "pages hold no scores, or no positions");
  const auto* given = data_of<float>(mass, ScalarType::Float, chosen.count * slots, "mass");
  const Integers counted = integers_of(seen, chosen.count * slots, "seen");
  const Integers tokens = integers_of(before, chosen.count, "tokens before");
  const int64_t most = last < 0 ? INT64_MAX : last;
  for_all(chosen.count, kWorth / (20 * slots + 1), [&](int64_t i) {
    chosen.over_pages(i, notes_of(tier), [&](uint8_t* page, int64_t slot, int64_t held) {
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
      "page_read(Tensor data, Tensor table, int[] tier, Tensor length, Tensor streams, int slots, "
      "bool keys, bool values, str isa) -> Tensor[]");
  m.def(
      "page_weakest(Tensor data, Tensor table, int[] tier, Tensor length, Tensor streams, "
      "int slots, Tensor until) -> Tensor[]");
  m.def(
      "page_rescore(Tensor(a!) data, Tensor table, int[] tier, Tensor length, Tensor streams, "
      "Tensor score) -> ()");
  m.def(
      "page_accumulate(Tensor(a!) data, Tensor table, int[] tier, Tensor length, Tensor streams, "
      "Tensor before, Tensor mass, Tensor seen, int last, int over) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) {
  m.impl("page_read", TORCH_BOX(&kv::page_read));
  m.impl("page_weakest", TORCH_BOX(&kv::page_weakest));
  m.impl("page_rescore", TORCH_BOX(&kv::page_rescore));
  m.impl("page_accumulate", TORCH_BOX(&kv::page_accumulate));
}
