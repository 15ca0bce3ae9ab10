#include <algorithm>
#include <numeric>

#include "prompt_pass.h"

namespace kv {
namespace {

constexpr int64_t kMostSums = 1 << 18;  // floats per task, to stay in the L2 cache
constexpr int64_t kLeastRows = 8 * kTile;  // minimum to amortize unpacking the tokens again
constexpr int64_t kMostKept = 1 << 21;  // logits that a task keeps, if its rows are not too few
constexpr int64_t kTasks = 4;           // per worker, to balance the load

// Number of tokens that each query of a table row sees.
std::vector<int64_t> seen_by(const Job& job, const Sequence& sequence,
                             const std::vector<std::vector<int>>& starts, int64_t table_row) {
  const auto count = int64_t(sequence.place.size());
  std::vector<int64_t> seen(count, 0);
  for (size_t i = 0; i < job.parts.size() && count; ++i) {
    const Part& part = job.parts[i];
    if (part.paged) {
      seen[0] += part.count(table_row);
      continue;
    }
    const int* start = starts[i].data() + table_row / job.heads * part.width;
    for (int64_t slot = 0; slot < part.width; ++slot)
      if (start[slot] < count) ++seen[start[slot]];
  }
  std::partial_sum(seen.begin(), seen.end(), seen.begin());
  return seen;
}

}  // namespace

Tasks::Tasks(const Job& job, const std::vector<Sequence>& sequences,
             const std::vector<std::vector<int>>& starts, int64_t kept, int tile, int workers) {
  std::vector<std::vector<int64_t>> seen;
  int64_t total = 0;
  for (int64_t table_row = 0; table_row < job.table_rows(); ++table_row) {
    seen.push_back(seen_by(job, sequences[table_row / job.heads], starts, table_row));
    total = std::accumulate(seen.back().begin(), seen.back().end(), total);
  }
  const int64_t limit = workers > 1 ? total / (kTasks * workers) : total;
  int64_t room = kMostSums / (panels_of(int(job.value_dim)) * kPanel);
  if (kept) room = std::min(room, std::max(kMostKept / kept, kLeastRows));
  int64_t held = std::max<int64_t>(1, room / job.group);
  // Queries whose rows fill tiles, as all rows of the last tile of a task are multiplied.
  int64_t whole = tile / std::gcd<int64_t>(tile, job.group);
  if (4 * whole > held) whole = 1;  // tasks would be smaller by much
  held -= held % whole;
  for (int64_t table_row = 0; table_row < job.table_rows(); ++table_row) {
    const auto count = int64_t(seen[table_row].size());
    // Tasks of equal size, as the last one unpacks the most tokens.
    const int64_t parts = (count + held - 1) / held;
    int64_t queries = parts ? (count + parts - 1) / parts : 1;
    queries += (whole - queries % whole) % whole;
    const int64_t least = std::min(queries, (kLeastRows + job.group - 1) / job.group);
    Task task{table_row, 0, 0, 0};
    for (int64_t i = 0; i < count; ++i) {
      task.work += seen[table_row][i] + 1;
      task.last = i + 1;
      const int64_t size = task.last - task.first;
      const bool fits = size < queries && (task.work <= limit || size < least);
      if (task.last < count && (fits || size % whole)) continue;
      all.push_back(task);
      most = std::max(most, size * job.group);
      task = {table_row, task.last, task.last, 0};
    }
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Task& a, const Task& b) { return a.work > b.work; });
}

}  // namespace kv
