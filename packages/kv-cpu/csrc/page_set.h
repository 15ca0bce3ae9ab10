// A set of page numbers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv {

// Its memory is proportional to the pages in it, as a pool may have many millions more: a bit for
// each page of a pool that is small enough, or else an open hash table, at most half full.
class PageSet {
 public:
  // At most `most` pages are added, of `all` that there are.
  PageSet(int64_t all, int64_t most) : bits_(all <= kAll * most) {
    const size_t slots = std::bit_ceil(size_t(2 * most + 2));
    bits_ ? words_.assign(size_t(all) / 64 + 1, 0) : words_.assign(slots, kNone);
    shift_ = 64 - std::countr_zero(slots);
  }

  // Adds a page; returns whether it was new.
  bool add(int64_t page) {
    uint64_t& word = words_[place(page)];
    const uint64_t before = word;
    word = bits_ ? before | bit(page) : uint64_t(page);
    return word != before;
  }

  bool has(int64_t page) const {
    const uint64_t word = words_[place(page)];
    return bits_ ? word & bit(page) : word != kNone;
  }

 private:
  static constexpr int64_t kAll = 512;  // pages whose bits cost no more than a page in a table
  static constexpr uint64_t kNone = ~uint64_t(0);

  static uint64_t bit(int64_t page) { return uint64_t(1) << (page & 63); }

  size_t place(int64_t page) const {
    if (bits_) return size_t(page) / 64;
    size_t i = size_t(uint64_t(page) * 0x9e3779b97f4a7c15u >> shift_);  // Fibonacci hashing
    while (words_[i] != kNone && words_[i] != uint64_t(page)) i = (i + 1) & (words_.size() - 1);
    return i;
  }

  std::vector<uint64_t> words_;
  bool bits_;
  int shift_;  // 64 less the bits of a slot's index
};

}  // namespace kv
