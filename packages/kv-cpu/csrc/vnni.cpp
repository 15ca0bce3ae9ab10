// Kernels for AVX-512 VNNI: codes with one scale for a vector are multiplied as bytes. The rest is
// left to the plain kernels, compiled for AVX-512.
//
// Queries become 16-bit integers in two planes of bytes, and so do the weights of a run of tokens
// (14 bits where values have codes of 8 bits, as one factor must be signed); sums are exact.
#include <immintrin.h>

#include "kernels.inc"

namespace kv {
namespace {

constexpr int kBytes = 64;      // of a register
constexpr int kMostWidth = 256;  // codes of a vector whose sums stay within 32 bits

bool is_taken(const Format& format) {
  return one_scale(format) && width_of(format) <= kMostWidth;
}

int chunks_of(const Format& format) { return (format.stride + kBytes - 1) / kBytes; }

// Lanes of a register that hold a row's bytes from `at` on.
__mmask64 lanes(int left) { return left >= kBytes ? ~__mmask64(0) : (__mmask64(1) << left) - 1; }

template <int kBits>
inline __m512i plane(__m512i x, int place) {
  if (kBits == 8) return x;
  const __m512i mask = _mm512_set1_epi8((1 << kBits) - 1);
  return _mm512_and_si512(_mm512_srl_epi16(x, _mm_cvtsi32_si128(place * kBits)), mask);
}

// Queries as integers: step * (256 * high + low). The planes of a row lie as those of its codes.
struct Prepared {
  const float *step, *sum;
  const int8_t *high, *low;
  int width;  // bytes from one query to the next

  static Prepared in(const void* from, const Format& format, int group) {
    const auto* numbers = static_cast<const float*>(from);
    const auto* bytes = reinterpret_cast<const int8_t*>(numbers + 2 * group);
    const int width = chunks_of(format) * kBytes * (8 / format.bits);
    return {numbers, numbers + group, bytes, bytes + group * width, width};
  }
};

int64_t prepared_size(const Format& format, int group) {
  if (!is_taken(format)) return 0;
  const int width = chunks_of(format) * kBytes * (8 / format.bits);
  // A multiple of 64 for each part keeps the next one's floats where floats may lie.
  return (group * (2 * sizeof(float) + 2 * width) + 63) / 64 * 64;
}

void prepare(const Format& format, const Queries& queries, void* to) {
  const Prepared found = Prepared::in(to, format, queries.group);
  auto* steps = const_cast<float*>(found.step);
  auto* sums = const_cast<float*>(found.sum);
  auto* high = const_cast<int8_t*>(found.high);
  auto* low = const_cast<int8_t*>(found.low);
  std::memset(high, 0, 2 * queries.group * found.width);
  const int row = chunks_of(format) * kBytes;
  for (int g = 0; g < queries.group; ++g, high += found.width, low += found.width) {
    const float* q = queries.rows + g * queries.width;
    float most = 0;
    bool finite = true;
    for (int d = 0; d < format.dim; ++d) {
      const float size = std::fabs(q[d]);
      finite = finite && size < INFINITY;
      most = size > most ? size : most;
    }
    const float step = most / 32639.0f;  // 256 * 127 + 127
    const bool rounded = finite && most > 1e-30f;  // less than that is nothing
    const float inverse = rounded ? 32639.0f / most : 0.0f;
    int sum = 0;
    for (int d = 0; rounded && d < format.dim; ++d) {
      const int code = int(std::lrintf(q[d] * inverse));
      const int upper = (code + 128) >> 8;
      const int at = d / format.stride * row + d % format.stride;
      high[at] = int8_t(upper);
      low[at] = int8_t(code - 256 * upper);
      sum += code;
    }
    steps[g] = finite ? step : NAN;
    sums[g] = step * float(sum);
  }
}

// Lane i of the result is the sum of x[i]'s lanes.
inline __m512i sums_of(__m512i* x) {
  for (int i = 0; i < 8; ++i)
    x[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                            _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 4; ++i)
    x[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]),
                            _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    x[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0x88),
                            _mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0xdd));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[1], 0x88),
                          _mm512_shuffle_i32x4(x[0], x[1], 0xdd));
}

// The scales and zeros of up to 16 tokens.
inline void numbers_of(const Rows& rows, int first, int count, __m512& scale, __m512& zero) {
  const __mmask16 mask = count >= 16 ? 0xffff : (1 << count) - 1;
  const __m512i both = _mm512_maskz_loadu_epi32(mask, rows.meta + int64_t(first) * 4);
  scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both));
  zero = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
}

// Products of kGroup queries with 16 / kGroup tokens at a time.
template <int kBits, int kGroup>
void products(const Format& format, const Rows& rows, int count, const Prepared& queries, int g,
              const float* scale, const float* zero, float* logits) {
  constexpr int kTokens = 16 / kGroup, kHalf = kTokens / 2;
  const int chunks = chunks_of(format);
  const int8_t* high = queries.high + g * queries.width;
  const int8_t* low = queries.low + g * queries.width;
  for (int first = 0; first < count; first += kTokens) {
    __m512i found[16];
    for (int half = 0; half < 2; ++half) {
      __m512i upper[kHalf][kGroup], lower[kHalf][kGroup];
      for (auto& of : upper) for (auto& x : of) x = _mm512_setzero_si512();
      for (auto& of : lower) for (auto& x : of) x = _mm512_setzero_si512();
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const __mmask64 mask = lanes(format.stride - chunk * kBytes);
#pragma GCC unroll 8
        for (int t = 0; t < kHalf; ++t) {
          int i = first + half * kHalf + t;
          i = i < count ? i : count - 1;
          const __m512i bytes =
              _mm512_maskz_loadu_epi8(mask, rows.data + i * rows.step + chunk * kBytes);
#pragma GCC unroll 8
          for (int p = 0; p < 8 / kBits; ++p) {
            const __m512i codes = plane<kBits>(bytes, p);
            const int at = (p * chunks + chunk) * kBytes;
#pragma GCC unroll 4
            for (int k = 0; k < kGroup; ++k) {
              upper[t][k] = _mm512_dpbusd_epi32(
                  upper[t][k], codes, _mm512_loadu_si512(high + k * queries.width + at));
              lower[t][k] = _mm512_dpbusd_epi32(
                  lower[t][k], codes, _mm512_loadu_si512(low + k * queries.width + at));
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < kHalf; ++t)
#pragma GCC unroll 4
        for (int k = 0; k < kGroup; ++k)
          found[k * kTokens + half * kHalf + t] =
              _mm512_add_epi32(_mm512_slli_epi32(upper[t][k], 8), lower[t][k]);
    }
    alignas(64) float sums[16];
    _mm512_store_ps(sums, _mm512_cvtepi32_ps(sums_of(found)));
    const int left = count - first < kTokens ? count - first : kTokens;
    for (int k = 0; k < kGroup; ++k) {
      float* to = logits + (g + k) * kBlock + first;
      const float step = queries.step[g + k], sum = queries.sum[g + k];
      for (int t = 0; t < left; ++t)
        to[t] = sums[k * kTokens + t] * step * scale[first + t] + zero[first + t] * sum;
    }
  }
}

template <int kBits>
void dot_codes(const Format& format, const Rows& rows, int count, const Prepared& queries,
               int group, float* logits) {
  alignas(64) float scale[kBlock], zero[kBlock];
  for (int i = 0; i < count; i += 16) {
    __m512 scales, zeros;
    numbers_of(rows, i, count - i, scales, zeros);
    _mm512_store_ps(scale + i, scales);
    _mm512_store_ps(zero + i, zeros);
  }
  int g = 0;
  for (; g + 4 <= group; g += 4)
    products<kBits, 4>(format, rows, count, queries, g, scale, zero, logits);
  if (g + 2 <= group) {
    products<kBits, 2>(format, rows, count, queries, g, scale, zero, logits);
    g += 2;
  }
  if (g < group) products<kBits, 1>(format, rows, count, queries, g, scale, zero, logits);
}

void dot_vnni(const Format& format, const Rows& rows, int count, const Queries& queries,
              const void* prepared, float* logits) {
  if (!prepared) return dot(format, rows, count, queries, nullptr, logits);
  const Prepared found = Prepared::in(prepared, format, queries.group);
  switch (format.bits) {
    case 8: return dot_codes<8>(format, rows, count, found, queries.group, logits);
    case 4: return dot_codes<4>(format, rows, count, found, queries.group, logits);
    case 2: return dot_codes<2>(format, rows, count, found, queries.group, logits);
    default: return dot_codes<1>(format, rows, count, found, queries.group, logits);
  }
}

#include "vnni_values.inc"

}  // namespace

extern const Kernels vnni_kernels = {"vnni", prepared_size, prepare, dot_vnni, weigh_vnni,
                                     soften, observe,       widen};

}  // namespace kv
