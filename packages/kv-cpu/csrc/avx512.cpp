#include "kernels.inc"

namespace kv {

extern const Kernels avx512_kernels = {"avx512", nullptr, nullptr, dot,  weigh,
                                       soften, observe, renew, widen, bound};

}  // namespace kv
