// What attention of many queries is computed with, in plain structs, as attention.h says.
#pragma once

#include "scores.h"

namespace kv {

constexpr int panels_of(int count) { return (count + kPanel - 1) / kPanel; }

// Vectors of a block of tokens for products: narrow ones are bfloat16, in pairs. Where vectors have
// one scale, these are codes, exact in either, and the scale and zero of each token lie apart.
struct Packed {
  bool narrow, scaled;
  void* panels;
  float *scale, *zero;
};

// A block of tokens. Keys lie in panels of kPanel tokens, dimension by dimension; values in panels
// of kPanel dimensions, token by token, and are zero up to the end of the last panel of tokens.
struct PackedBlock {
  Packed keys, values;
  int key_dim, value_dim;
  const int* start;   // of each token the first query that sees it
  const int* latest;  // of each panel of tokens the largest of these
};

// kTile rows, each a query of a head of the group, and what they came to so far: weights relative
// to 2**top. Sums lie in panels of kPanel dimensions, row by row.
struct RowTile {
  const void* queries;  // narrow or not, as the keys are
  const float* totals;  // of the numbers of each query
  const int* rank;      // of each row's query among those of the sequence; they ascend
  float *top, *total, *sums;
  // room for the logits and weights of a block, and for products that are added to the sums
  float *logits, *weights, *found;
};

// The kernels of one instruction set.
struct PromptKernels {
  bool narrow;  // numbers in bfloat16 can be multiplied as they are
  void (*put_query)(Number, const void* from, int64_t step, int dim, bool narrow, void* row);
  void (*pack_keys)(const Format&, const Rows&, const Packed& to);
  void (*pack_values)(const Format&, const Rows&, const Packed& to);
  // Adds the first panels of a block of tokens to what rows came to. Logits are to the base of 2,
  // with `scale` multiplied in.
  void (*attend)(const PackedBlock&, int panels, float scale, const RowTile&);
};

extern const PromptKernels plain_prompt;
#ifdef KV_X86
extern const PromptKernels avx2_prompt;
extern const PromptKernels avx512_prompt;
extern const PromptKernels bf16_prompt;
extern const PromptKernels amx_prompt;
extern const PromptKernels amx_emulated_prompt;
#endif

}  // namespace kv
