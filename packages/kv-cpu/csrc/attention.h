// What attention is computed of, in plain structs: neither torch nor the standard library's
// templates may be seen by the kernels, which are compiled once for each instruction set.
#pragma once

#include <cstdint>

namespace kv {

constexpr int kBlock = 256;   // tokens whose logits are held at once
constexpr int kMostDim = 1024;  // of a key or a value; a few decoded rows lie on the stack
constexpr int kLanes = 16;    // numbers that rows, and rows of a block, are padded to

constexpr int padded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

// How the numbers of a vector are stored.
enum class Number : int { kCodes, kFloat32, kFloat16, kBFloat16 };

// One codec: integers after BitLayout with a scale and a zero per group, or plain numbers.
struct Format {
  Number number;
  int dim;
  int bits;    // of a code
  int group;   // dimensions that share a scale
  int stride;  // bytes of codes
  int groups;

  // Bytes of a vector, but for its scales and zeros.
  int bytes() const {
    return number == Number::kCodes ? stride : dim * (number == Number::kFloat32 ? 4 : 2);
  }
  int meta_bytes() const { return 4 * groups; }
};

// The vectors of up to kBlock tokens, each by its address, as pages may hold few that lie together.
// The last one is repeated up to a multiple of kLanes.
//
// Kernels may take a format in strips of kLanes rows: of a strip that is whole, whose rows lie in equal
// steps, only the first row's address is given.
struct Rows {
  int count;
  const uint8_t* const* data;
  const uint8_t* const* meta;  // scales, then zeros; nothing to read for plain numbers
  const bool* whole;           // by strip; null where all addresses are given
  int64_t step;                // bytes from row to row of a whole strip
};

// The rows that come next: kernels ask the memory for them, a few at a time, while they compute.
struct Ahead {
  Rows rows;
  int bytes, meta_bytes;  // of a row

  // Those from row `first` on, which a strip starts with, up to `last`.
  Ahead part(int first, int last) const {
    return {{last - first, rows.data + first, rows.meta + first,
             rows.whole ? rows.whole + first / kLanes : nullptr, rows.step},
            bytes,
            meta_bytes};
  }
};

// The queries of one KV head, with the scale of the logits multiplied in.
struct Queries {
  const float* rows;  // group x padded dimensions; what is padded is 0
  const float* sums;  // of each row
  int group;
  int width;  // floats from one row to the next
};

// What is summed of a probability p.
enum class Term : int { kPlain, kSquare, kEntropy, kAbove };
// How the query heads of a KV head are brought together; the last after queries are summed.
enum class Group : int { kSum, kMean, kMax, kMaxOfSums };

// The kernels of one instruction set. Matrices of logits and weights are group x kBlock.
struct Kernels {
  const char* name;
  // Bytes that `prepare` writes for queries of keys in a format; 0: nothing is to be prepared.
  // Where no format has anything to prepare, both are null.
  int64_t (*prepared_size)(const Format&, int group);
  void (*prepare)(const Format&, const Queries&, void* to);
  // logits[g][i] = queries[g] . rows[i]; `prepared` is null where its size is 0. What is written
  // behind the last row, up to a multiple of kLanes, means nothing.
  void (*dot)(const Format&, const Rows&, const Queries&, const void* prepared, float* logits,
              const Ahead&);
  // sums[g] += weights[g] . rows, over the tokens; weights are 0 up to a multiple of kLanes
  void (*weigh)(const Format&, const Rows&, int group, const float* weights, float* sums,
                int width, const Ahead&);
  // weights = exp(logits - top), where top is the largest logit so far; sums and total are
  // scaled down where a larger one came. In place; 0 up to a multiple of kLanes.
  void (*soften)(float* logits, int count, int group, float* top, float* total, float* sums,
                 int width, const Ahead&);
  // out[i] = the group's terms of p[g] = weights[g][i] * factor[g]
  void (*observe)(const float* weights, int count, int group, const float* factor, Term, Group,
                  float above, float* out);
  // Numbers of any kind but codes, to float32.
  void (*widen)(Number, const void* from, int count, float* to);
  // Whether rows of a format are taken in strips; null: none are.
  bool (*strips)(const Format&) = nullptr;
  // What a thread calls before the first of its products and after the last; may be null.
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

// The kernels of a name that this processor can run; null if there are none.
const Kernels* kernels(const char* name);

}  // namespace kv
