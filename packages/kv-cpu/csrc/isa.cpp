#ifdef KV_X86
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

// A process must request tiles, as they enlarge the state saved for a signal.
bool has_amx() {
  static const bool granted = [] {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return has_vnni() && __builtin_cpu_supports("amx-tile") &&
           __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return granted;
}
#endif

// The last available one is used. Emulated tiles are for tests, so they are never the last.
const Choice choices[] = {
    {&plain_kernels, always},
#ifdef KV_X86
    {&amx_emulated_kernels, has_vnni},
    {&avx2_kernels, has_avx2},
    {&avx512_kernels, has_avx512},
    {&vnni_kernels, has_vnni},
    {&amx_kernels, has_amx},
#endif
};

}  // namespace

const Kernels* kernels(const char* name) {
  for (const Choice& choice : choices)
    if (std::strcmp(choice.kernels->name, name) == 0 && choice.runs()) return choice.kernels;
  return nullptr;
}

int level_of(const std::string& isa) {
  if (isa == "plain") return 0;
  if (isa == "avx2") return 1;
#ifdef KV_X86
  if (isa == "avx512" || !__builtin_cpu_supports("avx512bf16")) return 2;
  if (isa == "amx-emulated") return 4;
  if (has_amx()) return 5;
  // On the Intel processor that was measured, AVX512-BF16 was slower than float32.
  if (!__builtin_cpu_is("intel")) return 3;
#endif
  return 2;
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
