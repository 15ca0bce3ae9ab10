#include <algorithm>

#include "ops.h"

namespace kv {
namespace {

constexpr int64_t kLeast = 1 << 15;  // bytes that are worth a piece of their own

struct Size {
  int64_t tokens, bytes;
};

Size size_of(const Job& job, int64_t stream) {
  Size size{0, 0};
  for (const Part& part : job.parts) {
    size.tokens += part.count(stream);
    size.bytes += part.count(stream) * part.bytes();
  }
  return size;
}

// The token at which a stream's first bytes end.
int64_t token_at(const Job& job, int64_t stream, int64_t bytes) {
  int64_t before = 0;
  for (const Part& part : job.parts) {
    const int64_t count = part.count(stream), size = part.bytes();
    if (bytes < count * size) return before + bytes / size;
    bytes -= count * size;
    before += count;
  }
  return before;
}

// Blocks that so many tokens take at most, as each part begins one of its own.
int64_t blocks_of(const Job& job, int64_t tokens) {
  return tokens / kBlock + int64_t(job.parts.size());
}

}  // namespace

Plan plan(const Job& job, int workers) {
  std::vector<Size> sizes(job.streams(), Size{0, 0});
  int64_t total = 0;
  for (int64_t stream = 0; stream < job.streams(); ++stream) {
    if (job.position[stream / job.heads] < 0) continue;  // its query is padding
    sizes[stream] = size_of(job, stream);
    total += sizes[stream].bytes;
  }
  const int64_t limit = std::max(kLeast, total / (3 * workers));
  Plan found;
  for (int64_t stream = 0; stream < job.streams(); ++stream) {
    const auto [tokens, bytes] = sizes[stream];
    const int64_t cuts = workers == 1 ? 1 : std::max<int64_t>(1, (bytes + limit - 1) / limit);
    if (cuts == 1) {
      found.pieces.push_back({stream, 0, tokens, bytes, true, -1, 0});
      found.longest = std::max(found.longest, blocks_of(job, tokens));
      continue;
    }
    found.splits.push_back(stream);
    found.of.emplace_back();
    int64_t first = 0;
    for (int64_t cut = 1; cut <= cuts; ++cut) {
      const int64_t last = cut == cuts ? tokens : token_at(job, stream, bytes * cut / cuts);
      found.of.back().push_back(found.split_pieces);
      found.pieces.push_back(
          {stream, first, last, bytes / cuts, cut == cuts, found.split_pieces++, found.kept});
      found.kept += blocks_of(job, last - first);
      first = last;
    }
  }
  std::stable_sort(found.pieces.begin(), found.pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.bytes > b.bytes; });
  return found;
}

}  // namespace kv
