// Kernels for AVX-512 VNNI: codes with one scale per vector are multiplied as bytes, bfloat16
// numbers in float32, in registers. All else uses the float32 kernels, compiled for AVX-512.
//
// For codes, queries become 16-bit integers in two planes of bytes, and so do the weights of a block
// of tokens (14 bits where values have codes of 8 bits, as one factor must be signed); sums are
// exact.
#include <immintrin.h>

#include "kernels.inc"
#include "bytes.inc"
#include "vnni_keys.inc"
#include "vnni_values.inc"
#include "vnni_numbers.inc"

namespace kv {
namespace {

// Codes of 3 bits are unpacked row by row.
bool strips(const Format& format) {
  return is_narrow(format) || (is_taken(format) && format.bits != 3);
}

int64_t prepared_size(const Format& format, int group) {
  if (is_narrow(format)) return size_of_numbers(format, group);
  return size_of_codes(format, group);
}

void prepare(const Format& format, const Queries& queries, void* to) {
  is_narrow(format) ? prepare_numbers(format, queries, to) : prepare_codes(format, queries, to);
}

void dot_vnni(const Format& format, const Rows& rows, const Queries& queries, const void* prepared,
              float* logits, Ahead& ahead) {
  if (!prepared) return dot(format, rows, queries, nullptr, logits, ahead);
  if (is_narrow(format)) return dot_numbers(format, rows, queries, prepared, logits, ahead);
  dot_codes(format, rows, queries, prepared, logits, ahead);
}

void soften_vnni(float* logits, int count, int group, float* top, float* total, float* sums,
                 int width, Ahead& ahead) {
  Share share(ahead, kSoftenPart, group * ((count + 4 * kVector - 1) / (4 * kVector)));
  soften_with(logits, count, group, top, total, sums, width, [&] { share.more(); });
}

void weigh_vnni(const Format& format, const Rows& rows, int group, const float* weights, float* sums,
                int width, Ahead& ahead) {
  if (is_narrow(format)) return weigh_numbers(format, rows, group, weights, sums, width, ahead);
  if (is_taken(format)) return weigh_codes(format, rows, group, weights, sums, width, ahead);
  weigh(format, rows, group, weights, sums, width, ahead);
}

}  // namespace

extern const Kernels vnni_kernels = {"vnni", prepared_size, prepare, dot_vnni, weigh_vnni,
                                     soften_vnni, observe, renew, widen, bound, strips};

}  // namespace kv
