// A set of page numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kv {

// Its memory is proportional to the pages in it: a pool may have many millions more. It is an open
// hash table, at most half full.
class PageSet {
 public:
  // Adds a page, which is not negative; returns whether it was new.
  bool add(int64_t page) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    int64_t& slot = slots_[place(page)];
    if (slot == page) return false;
    slot = page, ++count_;
    return true;
  }

  bool has(int64_t page) const { return count_ && slots_[place(page)] == page; }

 private:
  static constexpr int64_t kNone = -1;

  size_t place(int64_t page) const {
    size_t i = size_t(uint64_t(page) * 0x9e3779b97f4a7c15u >> shift_);  // Fibonacci hashing
    while (slots_[i] != kNone && slots_[i] != page) i = (i + 1) & (slots_.size() - 1);
    return i;
  }

  void grow() {
    const std::vector<int64_t> before = std::exchange(slots_, {});
    shift_ -= before.empty() ? 0 : 2;
    slots_.assign(size_t(1) << (64 - shift_), kNone);
    for (const int64_t page : before)
      if (page != kNone) slots_[place(page)] = page;
  }

  std::vector<int64_t> slots_;
  size_t count_ = 0;
  int shift_ = 54;  // 64 less the bits of a slot's index
};

}  // namespace kv
