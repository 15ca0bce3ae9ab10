// The data of an attention computation, in plain structs: kernels are compiled once per instruction
// set, so they must not include torch or templates of the standard library.
#pragma once

#include <cstdint>

namespace kv {

constexpr int kBlock = 256;   // tokens whose logits are computed together
constexpr int kMostDim = 1024;  // of a key or a value; a few decoded rows are on the stack
constexpr int kLanes = 16;    // numbers that rows, and rows of a block, are padded to
constexpr int kMostLevels = 16;  // of a codebook

constexpr int padded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The storage type of a vector's numbers.
enum class Number : int { kCodes, kFloat32, kFloat16, kBFloat16 };

// One codec: codes with a scale and a zero point per group, or plain numbers. Codes are in a
// BitLayout; those of 3 bits are in two, the low two bits of all and then the high ones. They may
// stand for levels, which are multiplied by the only scale of a vector and have no zero point.
struct Format {
  Number number;
  int dim;
  int bits;    // of a code
  int group;   // dimensions that share a scale
  int stride;  // bytes of codes
  int groups;
  int share = 1;  // consecutive tokens with the same scales and zero points
  bool leveled = false;
  float levels[kMostLevels] = {};  // ascending; 0 after the last
  float bounds[kMostLevels] = {};  // between a level and the next

  // Bytes of a vector, without its scales and zero points.
  int bytes() const {
    return number == Number::kCodes ? stride : dim * (number == Number::kFloat32 ? 4 : 2);
  }
  // Of a vector, or of those that share them.
  int meta_bytes() const { return (leveled ? 2 : 4) * groups; }
  // Bytes of the two planes of codes of 3 bits.
  int low_bytes() const { return (dim + 3) / 4; }
  int high_bytes() const { return (dim + 7) / 8; }
  // Codes that the bytes have room for, with those of padding.
  int room() const { return bits == 3 ? 8 * high_bytes() : stride * (8 / bits); }
};

// Strips of kLanes rows, those of a page equally spaced. A strip in one or two pages has the address
// of its first row in each, and a head: its rows in the first page. The head of others is 0.
struct Strips {
  int head[kBlock / kLanes];
  const uint8_t *data[kBlock / kLanes][2], *meta[kBlock / kLanes][2];
};

// The vectors of up to kBlock tokens, by address, as few of them may be adjacent in pages. The last
// one is repeated up to a multiple of kLanes.
//
// Kernels may read a format in strips: then the addresses of a strip's rows are given only if it
// has no head.
struct Rows {
  int count;
  const uint8_t* const* data;
  const uint8_t* const* meta;  // scales, then zero points; unused for plain numbers
  const Strips* strips;        // null if the addresses of all rows are given
  int64_t step;                // bytes from row to row of a page
};

// Adjacent bytes.
struct Span {
  const uint8_t *first, *last;
};

// What kernels prefetch during the computation: the next rows; or, if they read rows in strips, the
// cache lines of a block's values and of the next block's keys, at an even rate from one kernel to
// the next.
struct Ahead {
  Rows rows{};
  int bytes = 0, meta_bytes = 0;  // of a row
  const uint8_t *at = nullptr, *last = nullptr;  // the rest of the present span
  const Span *span[2] = {}, *end[2] = {};        // those after it
  int lines = 0;                                 // of all spans
};

// The queries of one KV head, already multiplied by the scale of the logits.
struct Queries {
  const float* rows;  // group x padded dimensions; padding is 0
  const float* sums;  // of each row
  int group;
  int width;  // floats from one row to the next
};

// The summand of a probability p.
enum class Term : int { kPlain, kSquare, kEntropy, kAbove };
// The reduction over the query heads of a KV head; the last one after the sum over queries.
enum class Group : int { kSum, kMean, kMax, kMaxOfSums };

// How scores are updated with the attention mass of one query.
struct Renewal {
  int32_t query;     // its position
  int32_t most = 0;  // maximum weight of the past in a mean, in queries
  float over = 0;    // scores are sums of mass / over; 0: means over queries
};

// The kernels of one instruction set. Matrices of logits and weights are group x kBlock.
struct Kernels {
  const char* name;
  // Bytes that `prepare` writes for queries of keys in a format; 0: no preparation.
  // Both are null if no format needs preparation.
  int64_t (*prepared_size)(const Format&, int group);
  void (*prepare)(const Format&, const Queries&, void* to);
  // logits[g][i] = queries[g] . rows[i]; `prepared` is null if its size is 0. Entries after the
  // last row, up to a multiple of kLanes, are undefined.
  void (*dot)(const Format&, const Rows&, const Queries&, const void* prepared, float* logits,
              Ahead&);
  // sums[g] += weights[g] . rows, over the tokens; weights are 0 up to a multiple of kLanes
  void (*weigh)(const Format&, const Rows&, int group, const float* weights, float* sums,
                int width, Ahead&);
  // weights = exp(logits - top), where top is the largest logit so far; sums and total are
  // rescaled for a larger one. In place; 0 up to a multiple of kLanes.
  void (*soften)(float* logits, int count, int group, float* top, float* total, float* sums,
                 int width, Ahead&);
  // out[i] = the group's terms of p[g] = weights[g][i] * factor[g]
  void (*observe)(const float* weights, int count, int group, const float* factor, Term, Group,
                  float above, float* out);
  // Updates scores with the mass of one query; tokens at negative positions keep theirs. Positions
  // and scores may be unaligned.
  void (*renew)(const float* mass, int count, const uint8_t* positions, const Renewal&,
                uint8_t* scores);
  // Converts numbers of any kind except codes to float32.
  void (*widen)(Number, const void* from, int count, float* to);
  // logits = most * tanh(logits / most). In place, up to a multiple of kLanes.
  void (*bound)(float* logits, int count, int group, float most);
  // Whether rows of a format are read in strips; null: never.
  bool (*strips)(const Format&) = nullptr;
  // Called by a thread before the first of its products and after the last; may be null.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

extern const Kernels plain_kernels;
#ifdef KV_X86
extern const Kernels avx2_kernels;
extern const Kernels avx_vnni_kernels;
extern const Kernels avx512_kernels;
extern const Kernels vnni_kernels;
extern const Kernels amx_kernels;
extern const Kernels amx_emulated_kernels;
#elif defined(KV_ARM)
extern const Kernels neon_kernels;
extern const Kernels dotprod_kernels;
#endif

// The kernels with this name, if the processor supports them; null otherwise.
const Kernels* kernels(const char* name);

// The kernels that an available instruction set extends, or its own, whose products of numbers that
// are not codes are in float32.
const Kernels& in_float32(const Kernels& chosen);

}  // namespace kv
