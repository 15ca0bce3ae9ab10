// The data of attention with many queries, in plain structs, as in attention.h.
#pragma once

#include "scores.h"

namespace kv {

constexpr int panels_of(int count) { return (count + kPanel - 1) / kPanel; }

// Vectors of a block of tokens for products: narrow ones are bfloat16, in pairs. If vectors have
// one scale, these are codes, exact in either, and the scale and zero point of each token are
// separate.
struct Packed {
  bool narrow, scaled;
  void* panels;
  float *scale, *zero;
};

// A block of tokens. Keys are in panels of kPanel tokens, dimension by dimension; values in panels
// of kPanel dimensions, token by token, zero-padded to the end of the last panel of tokens.
struct PackedBlock {
  Packed keys, values;
  int key_dim, value_dim;
  const int* start;   // per token, the first query that sees it
  const int* latest;  // per panel of tokens, the maximum of these
};

// The rows of a tile, each a query of a head of the group, and their partial results: weights are
// relative to 2**top. Sums are in panels of kPanel dimensions, row by row.
struct RowTile {
  int count;   // rows in use; there is memory for all
  int panels;  // the first ones of the block, which the rows may see
  const void* queries;  // narrow if the keys are
  const float* totals;  // sums of the numbers of each query
  const int* rank;      // index of each row's query in the sequence, ascending
  float *top, *total, *sums;
  float* shift;  // that of each row's sums, of all dimensions, from the values' zero points
  bool keeps;    // whether all logits of the block are used later
  // buffers for the logits and weights of a block, and for products that are added to the sums;
  // those of logits are the tile's own if it keeps them
  float *logits, *weights, *found;
  // where the rows' weights of the block are kept, if they are, as in KeptRows
  float *kept, *kept_tops;
  int kept_rows;  // from a panel to the next, or from some tops to the next
};

// The rows of the next block, which may be prefetched between products.
struct NextRows {
  Ahead keys, values;
  int asked = 0;  // of each
};

constexpr int kTopPanels = 4;  // of a block, with the same tops

// Floats of a row's weights of a panel, which have 16 bits each.
constexpr int kKeptFloats = kPanel / 2;

// The kept weights of a task's rows for a block of tokens, relative to 2**top.
struct KeptRows {
  int count, room;  // rows in use, and all
  bool narrow;      // bfloat16 numbers in pairs; else as in kept.inc
  bool squares;     // of probabilities are summed
  const float* weights;  // panel x row x kPanel
  const float* tops;     // of kTopPanels panels x row
  const float* lse;      // of each row, in base 2
  const int* rank;       // as in RowTile
  const int* first;      // per panel, the first row whose weights are kept
  const int* start;      // per token, the first query that counts; null: all that see it
};

// The kernels of one instruction set.
struct PromptKernels {
  bool narrow;  // whether bfloat16 numbers can be multiplied directly
  int rows;     // of a tile
  void (*put_query)(Number, const void* from, int64_t step, int dim, bool narrow, void* row);
  void (*pack_keys)(const Format&, const Rows&, const Packed& to);
  void (*pack_values)(const Format&, const Rows&, const Packed& to);
  // Adds a block of tokens to the partial results of consecutive rows, all tiles of which but the
  // last are full. Logits are in base 2, with `scale` multiplied in, and bounded by `most` if it is
  // not 0.
  void (*attend)(const PackedBlock&, float scale, float most, const RowTile* tiles, int count,
                 NextRows&);
  // to[d] = sum * share + shift, for the sums of one row of a tile.
  void (*finish)(const float* sums, int panels, float share, float shift, float* to);
  // most[i] = the maximum of logits - lse, both in base 2, over the first rows of a tile, if it is
  // above; NaN if one is. Logits are as `attend` leaves them.
  void (*raise)(const float* logits, int panels, int rows, const float* lse, float* most);
  // sums[head][t] += the probabilities, or their squares, of the rows whose index is `head` modulo
  // `heads`; `by` is a buffer for a number per top.
  void (*mass)(const KeptRows&, int panels, int heads, float* by, float* sums);
};

extern const PromptKernels plain_prompt;
#ifdef KV_X86
extern const PromptKernels avx2_prompt;
extern const PromptKernels avx512_prompt;
extern const PromptKernels bf16_prompt;
extern const PromptKernels amx_prompt;
extern const PromptKernels amx_emulated_prompt;
#elif defined(KV_ARM)
extern const PromptKernels neon_prompt;
#endif

}  // namespace kv
