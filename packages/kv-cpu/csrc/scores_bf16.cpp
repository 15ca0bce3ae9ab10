// Products of bfloat16 with AVX512-BF16: two dimensions at a time, exact, into sums in float32.
#include <immintrin.h>

#include "scores.inc"

namespace kv {
namespace {

inline __m512bh pairs(const float* from) {
  return reinterpret_cast<__m512bh>(_mm512_load_si512(from));
}

inline void narrow_tile(const float* queries, int width, int depth, const float* keys,
                        float* logits) {
  __m512 sums[kTile][2];
#pragma GCC unroll 12
  for (int r = 0; r < kTile; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int d = 0; d < depth; ++d, keys += kPanel) {
    const __m512bh a = pairs(keys), b = pairs(keys + kWide);
#pragma GCC unroll 12
    for (int r = 0; r < kTile; ++r) {
      const int pair = load<int>(queries + r * width + d);
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], a, x);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], b, x);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kTile; ++r) {
    _mm512_store_ps(logits + r * kPanel, sums[r][0]);
    _mm512_store_ps(logits + r * kPanel + kWide, sums[r][1]);
  }
}

void narrow_products(const void* queries, int rows, int dim, bool narrow, const void* panel,
                     float* logits) {
  if (!narrow) return products(queries, rows, dim, false, panel, logits);
  const int width = row_bytes(dim, true) / 4;
  for (int r = 0; r < rows; r += kTile)
    narrow_tile(static_cast<const float*>(queries) + r * width, width, (dim + 1) / 2,
                static_cast<const float*>(panel), logits + r * kPanel);
}

}  // namespace

extern const ScoreKernels bf16_scores = {
    true, put_query, put_keys, narrow_products, soften_rows, observe_rows};

}  // namespace kv
