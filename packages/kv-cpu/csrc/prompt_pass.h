// A pass of many queries that is to be made.
#pragma once

#include "coder.h"
#include "ops.h"
#include "prompt.h"
#include "sequence.h"

namespace kv {

struct Prompt {
  Job job;  // its parts and the log-sum-exp [B, H, G, L] of the result; nothing is watched
  Chunk chunk;
  const PromptKernels* kernels;
  const Coder* coder;  // of the result
  uint8_t* out;        // [B, H, G, L, Dv], numbers of the queries' kind
};

// Attends to all parts, each query to the tokens that do not come after it; 0 and -inf for a query
// that is padding or sees none.
void attend(Prompt& prompt, int workers, Parallel parallel, Fault& fault);

// Queries first .. last - 1 of a table row, in the order of their positions, for one worker.
struct Task {
  int64_t table_row, first, last, work;
};

// Cuts table rows into about equal work, the most first. What a query comes to is the same wherever
// they are cut.
class Tasks {
 public:
  // starts: of each part the first query of each sequence that sees a place
  Tasks(const Job& job, const std::vector<Sequence>& sequences,
        const std::vector<std::vector<int>>& starts, int workers);

  std::vector<Task> all;
  int64_t most = 0;  // rows of one
};

}  // namespace kv
