// A pass of many queries.
#pragma once

#include "coder.h"
#include "ops.h"
#include "prompt.h"
#include "sequence.h"

namespace kv {

struct Prompt {
  Job job;  // its parts and the log-sum-exp [B, H, G, L] of the result; no watches
  Chunk chunk;
  const PromptKernels* kernels;
  const Coder* coder;  // for the result
  uint8_t* out;        // [B, H, G, L, Dv], numbers of the queries' kind
  // per part of the first ones, which are dense: the largest probability that a query gives each
  // token [B, H, width]
  std::vector<float*> largest;
};

// Computes attention over all parts, of each query to the tokens at or before its position; 0 and
// -inf for a query that is padding or sees no token. Probabilities are normalized over all parts;
// the largest of a token that no query sees is 0.
void attend(Prompt& prompt, int workers, Parallel parallel, Fault& fault);

// Queries first .. last - 1 of a table row, in the order of their positions, for one worker.
struct Task {
  int64_t table_row, first, last, work;
};

// Splits table rows into tasks of about equal work, the largest first. A query's result does not
// depend on the split.
class Tasks {
 public:
  // starts: per part and sequence, the first query that sees each slot
  // kept: tokens whose logits a task keeps, of all of its rows
  // tile: rows that are computed at once
  Tasks(const Job& job, const std::vector<Sequence>& sequences,
        const std::vector<std::vector<int>>& starts, int64_t kept, int tile, int workers);

  std::vector<Task> all;
  int64_t most = 0;  // maximum rows of a task
};

}  // namespace kv
