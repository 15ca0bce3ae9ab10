// The queries of a sequence in a pass, in the order of their positions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kv {

// A pass of many queries of each sequence.
struct Chunk {
  int64_t length;           // queries of a sequence
  int64_t query_step[5];    // bytes between sequences, heads, group, queries, dimensions
  const int64_t* position;  // [B, L], -1 for padding
};

struct Sequence {
  std::vector<int64_t> place, position;
  bool consecutive = true;  // whether positions are

  // The last real queries, at most `most`.
  Sequence(const Chunk& chunk, int64_t b, int64_t most) {
    const int64_t* at = chunk.position + b * chunk.length;
    for (int64_t i = 0; i < chunk.length; ++i)
      if (at[i] >= 0) place.push_back(i);
    if (int64_t(place.size()) > most) place.erase(place.begin(), place.end() - most);
    auto before = [at](int64_t a, int64_t b) { return at[a] < at[b]; };
    if (!std::is_sorted(place.begin(), place.end(), before))
      std::stable_sort(place.begin(), place.end(), before);
    for (int64_t i : place) position.push_back(at[i]);
    for (size_t i = 1; i < position.size(); ++i)
      consecutive &= position[i] == position[0] + int64_t(i);
  }

  int64_t latest() const { return position.empty() ? -1 : position.back(); }

  // The first query at or after a position.
  int from(int64_t at) const {
    if (consecutive && !position.empty())  // as those of most prompts
      return int(std::clamp<int64_t>(at, position[0], position.back() + 1) - position[0]);
    return int(std::lower_bound(position.begin(), position.end(), at) - position.begin());
  }
};

struct alignas(64) Line {  // rows and panels start at aligned addresses
  float numbers[16];
};

}  // namespace kv
