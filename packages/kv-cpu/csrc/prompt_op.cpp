// The operator for attention with many queries.
#include "arguments.h"
#include "boundary.h"
#include "prompt_pass.h"

namespace kv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const PromptKernels* const levels[] = {
    &plain_prompt,
#ifdef KV_X86
    &avx2_prompt, &avx512_prompt, &bf16_prompt, &amx_emulated_prompt, &amx_prompt,
#elif defined(KV_ARM)
    &neon_prompt,
#endif
};

// Reads the watch, if any: sums over all queries of probabilities, or of their squares.
void read_watch(Job& job, const std::vector<int64_t>& numbers, int64_t scored) {
  if (numbers.empty()) return;
  read_watches(job, numbers, {0.0});
  const Watch& watch = job.watches[0];
  const bool sums = watch.terms[0] == Term::kPlain || watch.terms[0] == Term::kSquare;
  if (watch.terms.size() > 1 || !sums || watch.group == Group::kMax)
    refuse("the watch has ", watch.terms.size(), " terms, and not one sum of probabilities or of ",
           "squares for each head; attention_mass sums others");
  within({"skip of the watch"}, watch.skip, 0, 1);
  if (scored) refuse(scored, " parts are scored and a watch is given; give at most one of them");
}

// The output [B, H, G, L, Dv] in the queries' dtype, the log-sum-exp [B, H, G, L], and of each of the
// first `scored` parts the largest probabilities [B, H, width]; the last two in float32. With a
// watch, then of each part the sums [1, B, H, width] in float32 and the counts [1, B, H, width].
std::vector<Tensor> attended(Tensor q, Tensor position, std::vector<Tensor> tensors,
                             std::vector<int64_t> parts, std::vector<int64_t> watch, int64_t scored,
                             int64_t value_dim, double scale, double softcap,
                             std::vector<Tensor> sinks, Name isa) {
  Prompt prompt;
  Job& job = prompt.job;
  prompt.chunk = read_chunk(job, q, position, value_dim, scale, isa);
  read_softmax(job, softcap, sinks);
  prompt.kernels = levels[level_of(isa.text)];
  prompt.coder = coder(isa.text.c_str());
  read_watch(job, watch, scored);
  std::vector<Tensor> results;
  const int64_t length = prompt.chunk.length;
  results.push_back(torch::stable::new_empty(
      q, {job.sequences, job.heads, job.group, length, value_dim}, q.scalar_type()));
  results.push_back(torch::stable::new_empty(q, {job.sequences, job.heads, job.group, length},
                                             ScalarType::Float));
  read_parts(job, q, tensors, parts, true, results);
  prompt.out = static_cast<uint8_t*>(results[0].mutable_data_ptr());
  job.lse = static_cast<float*>(results[1].mutable_data_ptr());
  within({"scored"}, scored, 0, int64_t(job.parts.size()));
  for (int64_t i = 0; i < scored; ++i) {
    const Part& part = job.parts[i];
    if (part.paged) refuse("part ", i, " is in pages; only dense tensors of tokens are scored");
    results.push_back(torch::stable::new_zeros(q, {job.sequences, job.heads, part.width},
                                               ScalarType::Float));
    prompt.largest.push_back(static_cast<float*>(results.back().mutable_data_ptr()));
  }
  if (length == 0) return results;
  Fault fault;
  attend(prompt, int(torch::stable::get_num_threads()), parallel, fault);
  check(job, fault);
  return results;
}

}  // namespace
}  // namespace kv

STABLE_TORCH_LIBRARY_FRAGMENT(kv_cpu, m) {
  m.def(
      "prompt(Tensor q, Tensor position, Tensor[] tensors, int[] parts, int[] watch, int scored, "
      "int value_dim, float scale, float softcap, Tensor[] sinks, str isa) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(kv_cpu, CPU, m) { m.impl("prompt", KV_BOX(&kv::attended)); }
