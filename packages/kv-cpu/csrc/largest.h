// The largest probability that each token receives from any of many queries.
#pragma once

#include "ops.h"
#include "scores.h"

namespace kv {

struct Largest {
  const ScoreKernels* kernels;
  int64_t sequences, heads, group, length, tokens;
  int dim;
  float scale;
  Number query_number, key_number;
  const uint8_t *queries, *keys;
  int64_t query_step[5];  // bytes between sequences, heads, group, queries, dimensions
  int64_t key_step[3];    // bytes between sequences, heads, tokens
  const float* lse;       // [B, H, G, L]; -inf: the query does not count
  float* out;             // [B, H, S]
};

// Computes the maximum over the queries of exp(scale * q.k - lse), 0 without any query.
void largest(const Largest& job, int workers, Parallel parallel);

}  // namespace kv
