// The operator that looks back at a pass of many queries, as torch sees it.
#include <torch/csrc/stable/library.h>

#include "arguments.h"
#include "look_back.h"
#include "name.h"

namespace kv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const ScoreKernels* const levels[] = {
    &plain_scores,
#ifdef KV_X86
    &avx2_scores, &avx512_scores, &bf16_scores, &amx_emulated_scores, &amx_scores,
#endif
};

// Of each part the sums [terms, B, H, width] in float32 and the counts [watches, B, H, width].
std::vector<Tensor> observed(Tensor q, Tensor position, Tensor lse, std::vector<Tensor> tensors,
                             std::vector<int64_t> parts, std::vector<int64_t> watches,
                             std::vector<double> above, std::vector<int64_t> last,
                             int64_t value_dim, double scale, Name isa) {
  Pass pass;
  Job& job = pass.job;
  pass.chunk = read_chunk(job, q, position, value_dim, scale, isa.text);
  pass.kernels = levels[level_of(isa.text)];
  STD_TORCH_CHECK(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() &&
                      lse.numel() == job.streams() * job.group * pass.chunk.length,
                  "log-sum-exps must be a contiguous float32 for each query of each head");
  pass.lse = static_cast<const float*>(lse.const_data_ptr());
  read_watches(job, watches, above);
  STD_TORCH_CHECK(!last.empty() && last.size() == above.size(),
                  "each watch needs its number of last queries");
  pass.last = last;
  std::vector<Tensor> results;
  read_parts(job, q, tensors, parts, true, results);
  Fault fault;
  look_back(pass, int(torch::stable::get_num_threads()), parallel, fault);
  check(job, fault);
  return results;
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def(
      "look_back(Tensor q, Tensor position, Tensor lse, Tensor[] tensors, int[] parts, "
      "int[] watches, float[] above, int[] last, int value_dim, float scale, str isa) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) { m.impl("look_back", TORCH_BOX(&kv::observed)); }
