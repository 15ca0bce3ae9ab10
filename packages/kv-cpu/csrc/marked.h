// Marked tokens of table rows, and the slots that they are written to.
#pragma once

#include "pages.h"

namespace kv {

constexpr int kRun = 256;     // maximum tokens encoded at once
constexpr int kShare = 512;   // marks per worker and iteration
constexpr int kWorth = 1024;  // tokens to encode that justify another thread

// Tokens first .. last - 1 of those given for table rows[i]; the kept ones are written to the slots
// from `slot` on.
struct Share {
  int64_t i, first, last, slot;
};

// Which of some tokens are kept, [S, L]; any byte but 0 is true.
struct Marks {
  explicit Marks(const View& keep)
      : data(keep.as<const uint8_t>()), count(keep.size(0)), columns(keep.size(1)) {}
  const uint8_t* of(int64_t i) const { return data + i * columns; }

  const uint8_t* data;
  int64_t count, columns;
};

// The work of writing them to the slots of table rows[i] from start[i]; raises if a page is missing.
std::vector<Share> shares_of(const Tier& tier, const Marks& marks, const Integers& table_rows,
                             const Integers& start);

// write(slot, tokens, count) for the kept tokens of a share, consecutive ones of one page together.
template <typename F>
void over_runs(const Tier& tier, const Marks& marks, const Share& share, const F& write) {
  const uint8_t* keep = marks.of(share.i);
  int64_t kept[kRun], slot = share.slot;
  int count = 0;
  for (int64_t token = share.first; token < share.last; ++token) {
    if (!keep[token]) continue;
    kept[count++] = token;
    if (count == kRun || (slot + count) % tier.tokens == 0) {
      write(slot, kept, count);
      slot += count, count = 0;
    }
  }
  if (count) write(slot, kept, count);
}

// f(share) for each, in several threads if the work justifies it.
template <typename F>
void for_shares(const std::vector<Share>& shares, const Marks& marks, const F& f) {
  for_all(int64_t(shares.size()), grain(kWorth, std::min<int64_t>(marks.columns, kShare - 1)),
          [&](int64_t k) { f(shares[k]); });
}

}  // namespace kv
