// Kernels for the dot products of bytes of Arm processors: codes with one scale per vector are
// multiplied as bytes. All else uses the float32 kernels, compiled for NEON.
//
// Queries become 16-bit integers in two planes of bytes, and so do the weights of a block of
// tokens; sums are exact.
#include <arm_neon.h>

#include "kernels.inc"
#include "dotprod_keys.inc"
#include "dotprod_values.inc"

namespace kv {

extern const Kernels dotprod_kernels = {"dotprod", prepared_size, prepare, dot_bytes, weigh_bytes,
                                        soften, observe, renew, widen, bound};

}  // namespace kv
