#include <algorithm>

#include "ops.h"

namespace kv {
namespace {

constexpr int64_t kLeast = 1 << 15;  // minimum bytes of a piece

struct Size {
  int64_t tokens, bytes;
};

Size size_of(const Job& job, int64_t table_row) {
  Size size{0, 0};
  for (const Part& part : job.parts) {
    size.tokens += part.count(table_row);
    size.bytes += part.count(table_row) * part.bytes();
  }
  return size;
}

// The token at which the first `bytes` bytes of a table row end.
int64_t token_at(const Job& job, int64_t table_row, int64_t bytes) {
  int64_t before = 0;
  for (const Part& part : job.parts) {
    const int64_t count = part.count(table_row), size = part.bytes();
    if (bytes < count * size) return before + bytes / size;
    bytes -= count * size;
    before += count;
  }
  return before;
}

// Maximum number of blocks for `tokens` tokens, as each part starts a new block.
int64_t blocks_of(const Job& job, int64_t tokens) {
  return tokens / kBlock + int64_t(job.parts.size());
}

}  // namespace

Plan plan(const Job& job, int workers) {
  std::vector<Size> sizes(job.table_rows(), Size{0, 0});
  int64_t total = 0;
  for (int64_t table_row = 0; table_row < job.table_rows(); ++table_row) {
    if (job.position[table_row / job.heads] < 0) continue;  // its query is padding
    sizes[table_row] = size_of(job, table_row);
    total += sizes[table_row].bytes;
  }
  const int64_t limit = std::max(kLeast, total / (3 * workers));
  Plan found;
  for (int64_t table_row = 0; table_row < job.table_rows(); ++table_row) {
    const auto [tokens, bytes] = sizes[table_row];
    const int64_t cuts = workers == 1 ? 1 : std::max<int64_t>(1, (bytes + limit - 1) / limit);
    if (cuts == 1) {
      found.pieces.push_back({table_row, 0, tokens, bytes, true, true, -1, 0});
      found.longest = std::max(found.longest, blocks_of(job, tokens));
      continue;
    }
    found.splits.push_back(table_row);
    found.of.emplace_back();
    int64_t first = 0;
    for (int64_t cut = 1; cut <= cuts; ++cut) {
      const int64_t last = cut == cuts ? tokens : token_at(job, table_row, bytes * cut / cuts);
      found.of.back().push_back(found.split_pieces);
      found.pieces.push_back(
          {table_row, first, last, bytes / cuts, cut == 1, cut == cuts, found.split_pieces++,
           found.kept});
      found.kept += blocks_of(job, last - first);
      first = last;
    }
  }
  std::stable_sort(found.pieces.begin(), found.pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.bytes > b.bytes; });
  return found;
}

}  // namespace kv
