// A completed pass of many queries, and its observations.
#pragma once

#include "ops.h"
#include "scores.h"
#include "sequence.h"

namespace kv {

struct Pass {
  Job job;  // its parts, watches and results; `position` is the latest of each sequence
  const ScoreKernels* kernels;
  Chunk chunk;
  const float* lse;           // [B, H, G, L]
  std::vector<int64_t> last;  // per watch: how many of the last queries count
};

// Computes the sums of the watches from the log-sum-exp of the pass.
void attention_mass(Pass& pass, int workers, Parallel parallel, Fault& fault);

}  // namespace kv
