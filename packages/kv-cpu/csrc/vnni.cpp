// Kernels for AVX-512 VNNI: codes with one scale per vector are multiplied as bytes. All else uses
// the float32 kernels, compiled for AVX-512.
//
// Queries become 16-bit integers in two planes of bytes, and so do the weights of a block of tokens
// (14 bits where values have codes of 8 bits, as one factor must be signed); sums are exact.
#include <immintrin.h>

#include "kernels.inc"
#include "bytes.inc"
#include "vnni_keys.inc"
#include "vnni_values.inc"

namespace kv {

namespace {
// Codes of 3 bits are unpacked row by row.
bool strips(const Format& format) { return is_taken(format) && format.bits != 3; }

void soften_vnni(float* logits, int count, int group, float* top, float* total, float* sums,
                 int width, Ahead& ahead) {
  Share share(ahead, kSoftenPart, group * ((count + 4 * kVector - 1) / (4 * kVector)));
  soften_with(logits, count, group, top, total, sums, width, [&] { share.more(); });
}
}  // namespace

extern const Kernels vnni_kernels = {"vnni", prepared_size, prepare, dot_vnni, weigh_vnni,
                                     soften_vnni, observe, renew, widen, bound, strips};

}  // namespace kv
