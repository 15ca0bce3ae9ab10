// The sums of the probabilities that the queries of a pass give each token, from kept weights.
#pragma once

#include <map>
#include <mutex>

#include "prompt_pass.h"

namespace kv {

// A block of tokens of which a task keeps logits or weights, and how many of its panels the rows of
// each tile may see.
struct KeptBlock {
  int part;
  std::vector<Run> runs;
  std::vector<int> panels;
  std::vector<float> sums = {};  // head x kBlock, if weights are kept
};

// Adds what tasks find to the sums of the only watch of a job. The tasks of a table row are added in
// their order, so that sums do not depend on the order in which workers finish them.
class Masses {
 public:
  Masses(Job& job, const std::vector<Sequence>& sequences, const std::vector<Task>& tasks);

  // Sums per token: one for each head of the group if the largest is the result.
  int heads() const { return heads_; }

  // The first query that counts for each token of a block, in `start`; null: all that see it.
  const int* starts(int64_t table_row, const KeptBlock& block, int* start) const;

  // Adds the sums of a task, by its index; thread-safe.
  void add(size_t task, std::vector<KeptBlock> blocks);

  // Completes the results when all tasks are added.
  void finish(Fault& fault);

 private:
  struct TableRow {
    std::mutex busy;
    int64_t next = 0;
    std::map<int64_t, std::vector<KeptBlock>> early;  // of tasks after the next one
  };

  const Watch& watch() const { return job_.watches[0]; }
  void add_next(int64_t table_row, const std::vector<KeptBlock>& blocks);
  float* sums_of(int part, int head);
  // Calls f(slot, first query that counts) for tokens of a run of a part.
  template <typename F>
  void each(int64_t table_row, int part, const Run& run, const F& f) const;

  Job& job_;
  const std::vector<Sequence>& sequences_;
  const std::vector<Task>& tasks_;
  const int heads_;
  std::vector<int64_t> order_;  // of each task among those of its table row
  std::vector<TableRow> table_rows_;
  std::vector<std::vector<std::vector<float>>> more_;  // per part, sums of heads after the first
};

}  // namespace kv
