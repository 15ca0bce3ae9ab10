#ifdef KV_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(KV_ARM)
#include <sys/auxv.h>
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
// What the processor has, and the system saves registers for. Compilers have functions for it, but
// those of zig find nothing.
struct Processor {
  Processor() {
    unsigned a, b, c, d, most;
    __cpuid(0, most, b, c, d);
    intel = b == signature_INTEL_ebx && c == signature_INTEL_ecx && d == signature_INTEL_edx;
    if (most < 7) return;
    unsigned first, extended, more, last, narrow;
    __cpuid(1, a, b, first, d);
    __cpuid_count(7, 0, a, extended, more, last);
    __cpuid_count(7, 1, narrow, b, c, d);
    if (a == 0) narrow = 0;  // there is no second part
    if (!(first & bit_OSXSAVE)) return;
    unsigned saved, rest;
    __asm__("xgetbv" : "=a"(saved), "=d"(rest) : "c"(0));
    constexpr unsigned kAvx = 0x6, kAvx512 = 0xe6, kTiles = 0x60000;
    avx2 = (saved & kAvx) == kAvx && all(first, bit_FMA | bit_F16C) && all(extended, bit_AVX2);
    avx512 = avx2 && (saved & kAvx512) == kAvx512 &&
             all(extended, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ);
    vnni = avx512 && all(more, bit_AVX512VNNI);
    bf16 = avx512 && all(narrow, 1u << 5);
    avx_vnni = avx2 && all(narrow, 1u << 4);
    amx = vnni && (saved & kTiles) == kTiles && all(last, 1u << 22 | 1u << 24 | 1u << 25);
  }
  static bool all(unsigned found, unsigned bits) { return (found & bits) == bits; }

  bool intel = false, avx2 = false, avx_vnni = false, avx512 = false, vnni = false, bf16 = false;
  bool amx = false;
};

const Processor& processor() {
  static const Processor found;
  return found;
}

bool has_avx2() { return processor().avx2; }
bool has_avx_vnni() { return processor().avx_vnni; }
bool has_avx512() { return processor().avx512; }
bool has_vnni() { return processor().vnni; }

// A process must request tiles, as they enlarge the state saved for a signal.
bool has_amx() {
  static const bool granted = [] {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return processor().amx && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return granted;
}
#elif defined(KV_ARM)
bool has_dotprod() {
#if defined(__APPLE__)
  int found = 0;
  size_t size = sizeof found;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, nullptr, 0) == 0 && found;
#else
  constexpr unsigned long kDotProd = 1ul << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & kDotProd;
#endif
}
#endif

// The last available one is used. Emulated tiles are for tests, so they are never the last.
const Choice choices[] = {
    {&plain_kernels, always},
#ifdef KV_X86
    {&amx_emulated_kernels, has_vnni},
    {&avx2_kernels, has_avx2},
    {&avx_vnni_kernels, has_avx_vnni},
    {&avx512_kernels, has_avx512},
    {&vnni_kernels, has_vnni},
    {&amx_kernels, has_amx},
#elif defined(KV_ARM)
    {&neon_kernels, always},
    {&dotprod_kernels, has_dotprod},
#endif
};

}  // namespace

const Kernels* kernels(const char* name) {
  for (const Choice& choice : choices)
    if (std::strcmp(choice.kernels->name, name) == 0 && choice.runs()) return choice.kernels;
  return nullptr;
}

const Kernels& in_float32(const Kernels& chosen) {
#ifdef KV_X86
  for (const Kernels* each : {&vnni_kernels, &amx_kernels, &amx_emulated_kernels})
    if (&chosen == each) return avx512_kernels;
#elif defined(KV_ARM)
  if (&chosen == &dotprod_kernels) return neon_kernels;
#endif
  return chosen;
}

int level_of(const std::string& isa) {
  if (isa == "plain") return 0;
#ifdef KV_X86
  if (isa == "avx2" || isa == "avx-vnni") return 1;
  if (isa == "avx512" || !processor().bf16) return 2;
  if (isa == "amx-emulated") return 4;
  if (has_amx()) return 5;
  // On the Intel processor that was measured, AVX512-BF16 was slower than float32.
  return processor().intel ? 2 : 3;
#else
  return 1;  // NEON
#endif
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
