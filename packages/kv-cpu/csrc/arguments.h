// What every operator over pages and tensors takes, read from what torch hands over.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "checked.h"
#include "name.h"
#include "ops.h"
#include "sequence.h"

namespace kv {

constexpr int64_t kMostGroup = 4096;  // queries that a KV head has at a position
constexpr int kMostTerms = 256;       // that are summed for a token

Number number_of(torch::headeronly::ScalarType type);

// How vectors are stored: number, dim, bits, group. Of plain numbers the last two mean nothing.
Format format_of(Label label, const int64_t* numbers);

// The kernels of an instruction set that runs here.
const Kernels* kernels_of(const Name& isa);

// Reads queries [B, H, G, L, D] and their positions [B, L] into a job, which is given its kernels.
Chunk read_chunk(Job& job, const torch::stable::Tensor& q, const torch::stable::Tensor& position,
                 int64_t value_dim, double scale, const Name& isa);

// The positions of queries [B, L], none of them above kMostPosition.
const int64_t* read_positions(const torch::stable::Tensor& position, int64_t sequences,
                              int64_t length);

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
