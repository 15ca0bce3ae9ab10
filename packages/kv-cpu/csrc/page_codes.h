// Logits of the keys in pages, from codes of 2 bits per dimension of rotated keys. Plain structs,
// as in attention.h.
//
// The codes of a page are rows of 16 dimensions of all of its tokens. A row has four bytes per
// token, and bits 2 p and 2 p + 1 of byte j are the code of dimension 4 p + j of the row's. Then
// there is a float16 scale per token. A code c stands for 2 c - 3.
#pragma once

#include "attention.h"

namespace kv {

constexpr int kCodedDims = 16;  // of a row of codes

constexpr int64_t code_bytes(int dim, int64_t tokens) {
  return tokens * (4 * ((dim + kCodedDims - 1) / kCodedDims) + 2);
}

// The queries of a KV head, rotated, as step * byte.
struct CodedQueries {
  const int8_t* bytes;  // of each query; those past the last dimension are 0
  const float* step;    // NaN for a query with an element that is not finite
  const int32_t* sum;   // of its bytes
  int group;
  int width;  // bytes of a query, a multiple of kCodedDims
};

struct CodeKernels {
  // to = q . rotation, and then its bytes, step and sum, for one query. The rotation has `dim` rows
  // of a padded width; `to` has room for that width.
  void (*rotate)(const float* q, const float* rotation, int dim, float* to, int8_t* bytes,
               float& step, int32_t& sum);
  // found[g * pitch + i] = the largest logit of query g and a key of page i.
  void (*largest)(const CodedQueries&, const uint8_t* const* pages, int count, int tokens,
                  float* found, int64_t pitch);
};

extern const CodeKernels plain_codes;
#ifdef KV_X86
extern const CodeKernels avx2_codes;
extern const CodeKernels avx_vnni_codes;
extern const CodeKernels avx512_codes;
extern const CodeKernels vnni_codes;
#elif defined(KV_ARM)
extern const CodeKernels neon_codes;
extern const CodeKernels dotprod_codes;
#endif

}  // namespace kv
