// The operator for the largest probability that each token receives.
#include <torch/csrc/stable/library.h>

#include "arguments.h"
#include "largest.h"

namespace kv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const ScoreKernels* const levels[] = {
    &plain_scores,
#ifdef KV_X86
    &avx2_scores,  &avx512_scores, &bf16_scores, &amx_emulated_scores, &amx_scores,
#endif
};

// The largest probabilities [B, H, S] in float32, for queries [B, H, G, L, D], their log-sum-exp
// [B, H, G, L] and keys [B, H, S, D].
Tensor largest_probability(Tensor q, Tensor lse, Tensor key, double scale, Name isa) {
  kernels_of(isa);
  const View x = view(q, {"q"}, kFloats, {kAny, kAny, kAny, kAny, kAny}, Lay::kStrided);
  Largest job;
  job.kernels = levels[level_of(isa.text)];
  job.sequences = x.size(0), job.heads = x.size(1), job.length = x.size(3);
  job.group = within({"queries of a KV head"}, x.size(2), 1, kMostGroup);
  job.dim = int(within({"dimensions of q"}, x.size(4), 1, kMostDim));
  job.scale = float(scale);
  job.query_number = number_of(x.type);
  job.queries = x.data;
  for (int i = 0; i < 5; ++i) job.query_step[i] = x.step(i);
  job.lse = view(lse, {"lse"}, kFloat32, {job.sequences, job.heads, job.group, job.length},
                 Lay::kContiguous)
                .as<const float>();
  const View keys =
      view(key, {"key"}, kFloats, {job.sequences, job.heads, kAny, job.dim}, Lay::kRows);
  job.key_number = number_of(keys.type);
  job.keys = keys.data;
  job.tokens = keys.size(2);
  for (int i = 0; i < 3; ++i) job.key_step[i] = keys.step(i);
  Tensor result =
      torch::stable::new_empty(q, {job.sequences, job.heads, job.tokens}, ScalarType::Float);
  job.out = static_cast<float*>(result.mutable_data_ptr());
  largest(job, int(torch::stable::get_num_threads()), parallel);
  return result;
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def("largest(Tensor q, Tensor lse, Tensor key, float scale, str isa) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) {
  m.impl("largest", TORCH_BOX(&kv::largest_probability));
}
