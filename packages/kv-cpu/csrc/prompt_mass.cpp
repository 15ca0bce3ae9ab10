#include "prompt_mass.h"

#include <algorithm>

namespace kv {

Masses::Masses(Job& job, const std::vector<Sequence>& sequences, const std::vector<Task>& tasks)
    : job_(job),
      sequences_(sequences),
      tasks_(tasks),
      heads_(watch().group == Group::kMaxOfSums ? int(job.group) : 1),
      table_rows_(job.table_rows()) {
  std::vector<int64_t> count(job.table_rows(), 0);
  for (const Task& task : tasks) order_.push_back(count[task.table_row]++);
  for (const Part& part : job.parts)
    more_.emplace_back(heads_ - 1, std::vector<float>(job.table_rows() * part.width, 0.0f));
}

template <typename F>
void Masses::each(int64_t table_row, int which, const Run& run, const F& f) const {
  const Part& part = job_.parts[which];
  const Sequence& sequence = sequences_[table_row / job_.heads];
  const int64_t* place = part.place + table_row / job_.heads * part.place_step[0] +
                         table_row % job_.heads * part.place_step[1];
  for (int64_t slot = run.slot; slot < run.slot + run.count; ++slot) {
    // Stored tokens precede every query.
    const int64_t at = part.paged ? -1 : std::min(place[slot * part.place_step[2]], kMostPosition);
    f(slot, part.paged ? 0 : sequence.from(at + watch().skip));
  }
}

const int* Masses::starts(int64_t table_row, const KeptBlock& block, int* start) const {
  // What a query does not see has no weight.
  if (job_.parts[block.part].paged || watch().skip == 0) return nullptr;
  int* to = start;
  for (const Run& run : block.runs)
    each(table_row, block.part, run, [&](int64_t, int from) { *to++ = from; });
  std::fill(to, start + kBlock, 0);
  return start;
}

void Masses::add(size_t task, std::vector<KeptBlock> blocks) {
  const int64_t at = tasks_[task].table_row;
  TableRow& table_row = table_rows_[at];
  const std::lock_guard<std::mutex> lock(table_row.busy);
  if (order_[task] != table_row.next) {
    table_row.early.emplace(order_[task], std::move(blocks));
    return;
  }
  add_next(at, blocks);
  for (++table_row.next; !table_row.early.empty(); ++table_row.next) {
    const auto found = table_row.early.begin();
    if (found->first != table_row.next) return;
    add_next(at, found->second);
    table_row.early.erase(found);
  }
}

float* Masses::sums_of(int part, int head) {
  return head ? more_[part][head - 1].data() : job_.sums[part];
}

void Masses::add_next(int64_t table_row, const std::vector<KeptBlock>& blocks) {
  for (const KeptBlock& block : blocks)
    for (int head = 0; head < heads_; ++head) {
      float* to = sums_of(block.part, head) + table_row * job_.parts[block.part].width;
      const float* from = &block.sums[head * kBlock];
      for (const Run& run : block.runs)
        for (int t = 0; t < run.count; ++t) to[run.slot + t] += *from++;
    }
}

void Masses::finish(Fault& fault) {
  for (int64_t table_row = 0; table_row < job_.table_rows(); ++table_row) {
    const auto queries = int(sequences_[table_row / job_.heads].place.size());
    Cursor cursor(job_, table_row, 0, queries ? job_.tokens(table_row) : 0, fault);
    Block block;
    while (fault.part < 0 && cursor.next(block))
      for (int i = 0; i < block.runs; ++i)
        each(table_row, block.part, block.run[i], [&](int64_t slot, int from) {
          job_.seen[block.part][table_row * job_.parts[block.part].width + slot] =
              std::max(0, queries - from);
        });
  }
  const float over = watch().group == Group::kMean ? float(job_.group) : 1;
  for (size_t part = 0; part < job_.parts.size(); ++part)
    for (int64_t i = 0; i < job_.table_rows() * job_.parts[part].width; ++i) {
      float& sum = job_.sums[part][i];
      for (const std::vector<float>& more : more_[part]) sum = std::max(sum, more[i]);
      sum /= over;
    }
}

}  // namespace kv
