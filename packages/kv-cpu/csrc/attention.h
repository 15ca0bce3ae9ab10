// The data of an attention computation, in plain structs: kernels are compiled once per instruction
// set, so they must not include torch or templates of the standard library.
#pragma once

#include <cstdint>

namespace kv {

constexpr int kBlock = 256;   // tokens whose logits are computed together
constexpr int kMostDim = 1024;  // of a key or a value; a few decoded rows are on the stack
constexpr int kLanes = 16;    // numbers that rows, and rows of a block, are padded to

constexpr int padded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The storage type of a vector's numbers.
enum class Number : int { kCodes, kFloat32, kFloat16, kBFloat16 };

// One codec: integers in a BitLayout with a scale and a zero point per group, or plain numbers.
struct Format {
  Number number;
  int dim;
  int bits;    // of a code
  int group;   // dimensions that share a scale
  int stride;  // bytes of codes
  int groups;

  // Bytes of a vector, without its scales and zero points.
  int bytes() const {
    return number == Number::kCodes ? stride : dim * (number == Number::kFloat32 ? 4 : 2);
  }
  int meta_bytes() const { return 4 * groups; }
};

// The vectors of up to kBlock tokens, by address, as few of them may be adjacent in pages. The last
// one is repeated up to a multiple of kLanes.
//
// Kernels may read a format in strips of kLanes rows: for a whole strip, of equally spaced rows,
// only the first row's address is given.
struct Rows {
  int count;
  const uint8_t* const* data;
  const uint8_t* const* meta;  // scales, then zero points; unused for plain numbers
  const bool* whole;           // by strip; null if all addresses are given
  int64_t step;                // bytes from row to row of a whole strip
};

// The next rows, which kernels prefetch, a few at a time, during the computation.
struct Ahead {
  Rows rows;
  int bytes, meta_bytes;  // of a row

  // Rows `first` to `last`; a strip starts at `first`.
  Ahead part(int first, int last) const {
    return {{last - first, rows.data + first, rows.meta + first,
             rows.whole ? rows.whole + first / kLanes : nullptr, rows.step},
            bytes,
            meta_bytes};
  }
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
              const Ahead&);
  // sums[g] += weights[g] . rows, over the tokens; weights are 0 up to a multiple of kLanes
  void (*weigh)(const Format&, const Rows&, int group, const float* weights, float* sums,
                int width, const Ahead&);
  // weights = exp(logits - top), where top is the largest logit so far; sums and total are
  // rescaled for a larger one. In place; 0 up to a multiple of kLanes.
  void (*soften)(float* logits, int count, int group, float* top, float* total, float* sums,
                 int width, const Ahead&);
  // out[i] = the group's terms of p[g] = weights[g][i] * factor[g]
  void (*observe)(const float* weights, int count, int group, const float* factor, Term, Group,
                  float above, float* out);
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
extern const Kernels avx512_kernels;
extern const Kernels vnni_kernels;
extern const Kernels amx_kernels;
extern const Kernels amx_emulated_kernels;
#endif

// The kernels with this name, if the processor supports them; null otherwise.
const Kernels* kernels(const char* name);

}  // namespace kv
