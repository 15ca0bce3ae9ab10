// What every operator over pages and tensors takes, read from what torch hands over.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "ops.h"
#include "sequence.h"

namespace kv {

Number number_of(torch::headeronly::ScalarType type);

// Reads queries [B, H, G, L, D] and their positions [B, L] into a job, which is given its kernels.
Chunk read_chunk(Job& job, const torch::stable::Tensor& q, const torch::stable::Tensor& position,
                 int64_t value_dim, double scale, const std::string& isa);

// numbers: of each watch group, skip, count of terms, terms; above: one of each
void read_watches(Job& job, const std::vector<int64_t>& numbers, const std::vector<double>& above);

// Adds the parts to a job whose sizes and watches are known, and to the results, of each part, the
// sums [terms, B, H, width] and counts [watches, B, H, width] where anything is watched: zeros, or
// whatever memory held.
void read_parts(Job& job, const torch::stable::Tensor& q,
                const std::vector<torch::stable::Tensor>& tensors,
                const std::vector<int64_t>& numbers, bool zeros,
                std::vector<torch::stable::Tensor>& results);

// Refuses what was found wrong on the way.
void check(const Job& job, const Fault& fault);

// Calls body(0, context) ... body(count - 1, context) in torch's threads.
void parallel(int64_t count, Body body, void* context);

}  // namespace kv
