#include <cstring>

#include "attention.h"
#include "ops.h"

namespace kv {
namespace {

struct Choice {
  const Kernels* kernels;
  bool (*runs)();
};

bool always() { return true; }

#ifdef KV_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

// The fastest come last.
const Choice choices[] = {
    {&plain_kernels, always},
#ifdef KV_X86
    {&avx2_kernels, has_avx2},
    {&avx512_kernels, has_avx512},
    {&vnni_kernels, has_vnni},
#endif
};

}  // namespace

const Kernels* kernels(const char* name) {
  for (const Choice& choice : choices)
    if (std::strcmp(choice.kernels->name, name) == 0 && choice.runs()) return choice.kernels;
  return nullptr;
}

std::string names(bool all) {
  std::string found;
  for (const Choice& choice : choices) {
    if (!all && !choice.runs()) continue;
    if (!found.empty()) found += ' ';
    found += choice.kernels->name;
  }
  return found;
}

}  // namespace kv
