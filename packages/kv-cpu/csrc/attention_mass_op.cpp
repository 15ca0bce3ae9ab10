// The operator that sums the attention mass of a pass of many queries.
#include "arguments.h"
#include "attention_mass.h"
#include "boundary.h"

namespace kv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const ScoreKernels* const levels[] = {
    &plain_scores,
#ifdef KV_X86
    &avx2_scores,  &avx512_scores, &bf16_scores, &amx_emulated_scores, &amx_scores,
#elif defined(KV_ARM)
    &neon_scores,
#endif
};

// Per part the sums [terms, B, H, width] in float32 and the counts [watches, B, H, width].
std::vector<Tensor> observed(Tensor q, Tensor position, Tensor lse, std::vector<Tensor> tensors,
                             std::vector<int64_t> parts, std::vector<int64_t> watches,
                             std::vector<double> above, std::vector<int64_t> last,
                             int64_t value_dim, double scale, double softcap, Name isa) {
  Pass pass;
  Job& job = pass.job;
  pass.chunk = read_chunk(job, q, position, value_dim, scale, isa);
  read_softmax(job, softcap, {});  // the log-sum-exp has the sinks
  pass.kernels = levels[level_of(isa.text)];
  pass.lse = view(lse, {"lse"}, kFloat32, {job.sequences, job.heads, job.group, pass.chunk.length},
                  Lay::kContiguous)
                 .as<const float>();
  read_watches(job, watches, above);
  if (last.empty() || last.size() != above.size())
    refuse("last has ", last.size(), " numbers for ", above.size(),
           " watches; it needs one per watch, and at least one");
  for (int64_t count : last) within({"a number of last queries"}, count, 0, INT64_MAX);
  pass.last = last;
  std::vector<Tensor> results;
  read_parts(job, q, tensors, parts, true, results);
  if (pass.chunk.length == 0) return results;
  Fault fault;
  attention_mass(pass, int(torch::stable::get_num_threads()), parallel, fault);
  check(job, fault);
  return results;
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def(
      "attention_mass(Tensor q, Tensor position, Tensor lse, Tensor[] tensors, int[] parts, "
      "int[] watches, float[] above, int[] last, int value_dim, float scale, float softcap, "
      "str isa) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) { m.impl("attention_mass", KV_BOX(&kv::observed)); }
