#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>

#include "prompt_pass.h"

namespace kv {
namespace {

constexpr int64_t kMostSums = 1 << 18;  // floats per task, to stay in the L2 cache
constexpr int64_t kLeastRows = 8 * kTile;  // minimum to amortize unpacking the tokens again
constexpr int64_t kMostKept = 1 << 21;  // logits that a task keeps, if its rows are not too few
constexpr int64_t kFewest = 3, kMost = 8;  // tasks per worker, of which the best balanced are taken
constexpr int64_t kUnpacked = 16;  // rows whose products with a token cost as much as unpacking it

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

// How table rows are split.
struct Split {
  int64_t limit;  // work per task
  int64_t held;   // most queries
  int64_t whole;  // queries whose rows fill tiles, as all rows of a task's last tile are multiplied
  int64_t least;  // fewest queries, if a table row has that many
};

// Tasks, the largest first.
std::vector<Task> tasks_of(const std::vector<std::vector<int64_t>>& seen, int64_t group,
                           const Split& split) {
  std::vector<Task> all;
  for (int64_t table_row = 0; table_row < int64_t(seen.size()); ++table_row) {
    const auto count = int64_t(seen[table_row].size());
    // Tasks of equal size, as the last one unpacks the most tokens.
    const int64_t parts = (count + split.held - 1) / split.held;
    int64_t queries = parts ? (count + parts - 1) / parts : 1;
    queries += (split.whole - queries % split.whole) % split.whole;
    const int64_t least = std::min(queries, split.least);
    Task task{table_row, 0, 0, 0};
    int64_t work = 0;
    for (int64_t i = 0; i < count; ++i) {
      work += seen[table_row][i] + 1;
      task.last = i + 1;
      const int64_t size = task.last - task.first;
      const bool fits = size < queries && (work <= split.limit || size < least);
      if (task.last < count && (fits || size % split.whole)) continue;
      task.work = work * group + seen[table_row][i] * kUnpacked;
      all.push_back(task);
      task = {table_row, task.last, task.last, 0}, work = 0;
    }
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Task& a, const Task& b) { return a.work > b.work; });
  return all;
}

// The work of the worker that ends last, if each takes the next task as soon as it is free.
int64_t longest(const std::vector<Task>& tasks, int workers) {
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> ends;
  for (int i = 0; i < workers; ++i) ends.push(0);
  int64_t last = 0;
  for (const Task& task : tasks) {
    const int64_t end = ends.top() + task.work;
    ends.pop(), ends.push(end);
    last = std::max(last, end);
  }
  return last;
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
  int64_t room = kMostSums / (panels_of(int(job.value_dim)) * kPanel);
  if (kept) room = std::min(room, std::max(kMostKept / kept, kLeastRows));
  Split split{total, std::max<int64_t>(1, room / job.group),
              tile / std::gcd<int64_t>(tile, job.group),
              (kLeastRows + job.group - 1) / job.group};
  if (4 * split.whole > split.held) split.whole = 1;  // tasks would be smaller by much
  split.held -= split.held % split.whole;
  all = tasks_of(seen, job.group, split);
  const bool splits = std::any_of(seen.begin(), seen.end(), [&](const auto& queries) {
    return int64_t(queries.size()) > split.least;
  });
  if (workers > 1 && splits) {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int64_t each = kFewest; each <= kMost; ++each) {
      split.limit = total / (each * workers);
      std::vector<Task> tasks = tasks_of(seen, job.group, split);
      const int64_t end = longest(tasks, workers);
      if (end < least) least = end, all = std::move(tasks);
    }
  }
  for (const Task& task : all) most = std::max(most, (task.last - task.first) * job.group);
}

}  // namespace kv
