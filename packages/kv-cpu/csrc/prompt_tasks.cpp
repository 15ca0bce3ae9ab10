#include <algorithm>
#include <numeric>

#include "prompt_pass.h"

namespace kv {
namespace {

constexpr int64_t kMostSums = 1 << 17;  // floats that a task may hold; they stay in the L2 cache
constexpr int64_t kLeastRows = 8 * kTile;  // that pay for unpacking the tokens once more
constexpr int64_t kTasks = 4;           // of each worker, for all to end at about the same time

// Tokens that each query of a stream sees.
std::vector<int64_t> seen_by(const Job& job, const Sequence& sequence,
                             const std::vector<std::vector<int>>& starts, int64_t stream) {
  const auto count = int64_t(sequence.place.size());
  std::vector<int64_t> seen(count, 0);
  for (size_t i = 0; i < job.parts.size() && count; ++i) {
    const Part& part = job.parts[i];
    if (part.paged) {
      seen[0] += part.count(stream);
      continue;
    }
    const int* start = starts[i].data() + stream / job.heads * part.width;
    for (int64_t slot = 0; slot < part.width; ++slot)
      if (start[slot] < count) ++seen[start[slot]];
  }
  std::partial_sum(seen.begin(), seen.end(), seen.begin());
  return seen;
}

}  // namespace

Tasks::Tasks(const Job& job, const std::vector<Sequence>& sequences,
             const std::vector<std::vector<int>>& starts, int workers) {
  std::vector<std::vector<int64_t>> seen;
  int64_t total = 0;
  for (int64_t stream = 0; stream < job.streams(); ++stream) {
    seen.push_back(seen_by(job, sequences[stream / job.heads], starts, stream));
    total = std::accumulate(seen.back().begin(), seen.back().end(), total);
  }
  const int64_t limit = workers > 1 ? total / (kTasks * workers) : total;
  const int64_t room = kMostSums / (panels_of(int(job.value_dim)) * kPanel);
  const int64_t queries = std::max<int64_t>(1, room / job.group);
  const int64_t least = std::min(queries, (kLeastRows + job.group - 1) / job.group);
  for (int64_t stream = 0; stream < job.streams(); ++stream) {
    const auto count = int64_t(seen[stream].size());
    Task task{stream, 0, 0, 0};
    for (int64_t i = 0; i < count; ++i) {
      task.work += seen[stream][i] + 1;
      task.last = i + 1;
      const int64_t size = task.last - task.first;
      if (task.last < count && size < queries && (task.work <= limit || size < least)) continue;
      all.push_back(task);
      most = std::max(most, size * job.group);
      task = {stream, task.last, task.last, 0};
    }
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Task& a, const Task& b) { return a.work > b.work; });
}

}  // namespace kv
