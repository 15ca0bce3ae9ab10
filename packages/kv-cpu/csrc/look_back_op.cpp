// The operator that looks back at a pass of many queries, as torch sees it.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "arguments.h"
#include "look_back.h"
#include "name.h"

namespace kv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Choice {
  const char* name;  // of an instruction set that runs here
  const ScoreKernels* kernels;
  bool (*runs)();
};

bool always() { return true; }

#ifdef KV_X86
bool has_bf16() { return __builtin_cpu_supports("avx512bf16"); }
#endif

const Choice choices[] = {
    {"plain", &plain_scores, always},
#ifdef KV_X86
    {"avx2", &avx2_scores, always},
    {"avx512", &avx512_scores, always},
    {"vnni", &bf16_scores, has_bf16},
    {"vnni", &avx512_scores, always},
    {"amx", &bf16_scores, has_bf16},
    {"amx", &avx512_scores, always},
    {"amx-emulated", &bf16_scores, has_bf16},
    {"amx-emulated", &avx512_scores, always},
#endif
};

const ScoreKernels* scores(const char* name) {
  for (const Choice& choice : choices)
    if (std::strcmp(choice.name, name) == 0 && choice.runs()) return choice.kernels;
  return nullptr;
}

// Of each part the sums [terms, B, H, width] in float32 and the counts [watches, B, H, width].
std::vector<Tensor> observed(Tensor q, Tensor position, Tensor lse, std::vector<Tensor> tensors,
                             std::vector<int64_t> parts, std::vector<int64_t> watches,
                             std::vector<double> above, std::vector<int64_t> last,
                             int64_t value_dim, double scale, Name isa) {
  Pass pass;
  Job& job = pass.job;
  job.kernels = kernels(isa.text.c_str());
  pass.kernels = job.kernels ? scores(isa.text.c_str()) : nullptr;
  STD_TORCH_CHECK(pass.kernels, "no kernels for ", isa.text, " here; there are ", names(false));
  STD_TORCH_CHECK(q.dim() == 5, "queries must be [B, H, G, L, D]");
  job.sequences = q.size(0), job.heads = q.size(1), job.group = q.size(2), job.key_dim = q.size(4);
  job.value_dim = value_dim;
  job.scale = float(scale);
  job.query_number = number_of(q.scalar_type());
  job.queries = static_cast<const uint8_t*>(q.const_data_ptr());
  pass.length = q.size(3);
  for (int i = 0; i < 5; ++i) pass.query_step[i] = q.stride(i) * q.element_size();
  STD_TORCH_CHECK(position.scalar_type() == ScalarType::Long && position.is_contiguous() &&
                      position.numel() == job.sequences * pass.length,
                  "positions must be a contiguous int64 for each query");
  pass.position = static_cast<const int64_t*>(position.const_data_ptr());
  STD_TORCH_CHECK(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() &&
                      lse.numel() == job.streams() * job.group * pass.length,
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
