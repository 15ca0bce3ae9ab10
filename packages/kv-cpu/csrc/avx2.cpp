#include "kernels.inc"

namespace kv {

extern const Kernels avx2_kernels = {"avx2", nullptr, nullptr, dot,  weigh,
                                     soften, observe, renew, widen, bound};

}  // namespace kv
