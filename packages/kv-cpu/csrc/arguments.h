// Argument parsing shared by all operators over pages and tensors.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "checked.h"
#include "name.h"
#include "ops.h"
#include "sequence.h"

namespace kv {

constexpr int64_t kMostGroup = 4096;  // queries of a KV head per position
constexpr int kMostTerms = 256;       // summed terms per token

Number number_of(torch::headeronly::ScalarType type);

// The storage format of vectors: number, dim, bits, group. The last two are unused for plain
// numbers. Codes that stand for levels are of kind kLevels, and have these beside.
constexpr int64_t kLevels = 4;
Format format_of(Label label, const int64_t* numbers, const int64_t* levels);

// How many levels follow the numbers of parts or tiers for a format.
int64_t levels_of(const int64_t* numbers);

// The kernels of an instruction set that is available here.
const Kernels* kernels_of(const Name& isa);

// Reads queries [B, H, G, L, D] and their positions [B, L] into a job, and sets its kernels.
Chunk read_chunk(Job& job, const torch::stable::Tensor& q, const torch::stable::Tensor& position,
                 int64_t value_dim, double scale, const Name& isa);

// Reads the bound of the logits, 0 for none, and sinks [H, G] in float32, one tensor or none, into a
// job whose queries have been read.
void read_softmax(Job& job, double softcap, const std::vector<torch::stable::Tensor>& sinks);

// The positions of queries [B, L], all at most kMostPosition.
const int64_t* read_positions(const torch::stable::Tensor& position, int64_t sequences,
                              int64_t length);

// numbers: of each watch group, skip, count of terms, terms; above: one of each
void read_watches(Job& job, const std::vector<int64_t>& numbers, const std::vector<double>& above);

// Reads groups of heads into a job whose sizes are set: of each group the number of its heads, the
// dimensions of their keys and of their values, the number of its parts, and its heads. Parts are in
// the order of groups. No numbers: all heads have the job's dimensions.
void read_groups(Job& job, const std::vector<int64_t>& numbers);

// Adds the parts to a job whose sizes, groups and watches are set.
void read_parts(Job& job, const std::vector<torch::stable::Tensor>& tensors,
                const std::vector<int64_t>& numbers);

// Adds to the results, per part of a job, the sums [terms, B, H, width] and counts
// [watches, B, H, width] if anything is observed: zeroed or uninitialized.
void make_sums(Job& job, const torch::stable::Tensor& q, bool zeros,
               std::vector<torch::stable::Tensor>& results);

// Does both.
void read_parts(Job& job, const torch::stable::Tensor& q,
                const std::vector<torch::stable::Tensor>& tensors,
                const std::vector<int64_t>& numbers, bool zeros,
                std::vector<torch::stable::Tensor>& results);

// Raises an error for a fault found during the computation.
void check(const Job& job, const Fault& fault);

// Calls body(0, context) ... body(count - 1, context) in torch's threads.
void parallel(int64_t count, Body body, void* context);

}  // namespace kv
