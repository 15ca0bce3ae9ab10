// What a pass of many queries is looked back at with, in plain structs, as attention.h says.
#pragma once

#include "attention.h"

namespace kv {

constexpr int kPanel = 32;     // tokens whose products are taken side by side
constexpr int kPanels = kBlock / kPanel;
constexpr int kTile = 12;      // rows are padded to a multiple of this
constexpr int kMostRows = 96;  // rows that are held at once, unless a group has more

// The queries of one KV head that are held: row i * group + g is of query first + i.
struct HeldRows {
  int queries, group, first;
  const float* lse;   // of each row
  const float* even;  // of each query: an even share of the tokens up to it
};

// The kernels of one instruction set. A panel holds kPanel keys, dimension by dimension; where
// numbers are narrow, they are bfloat16 and dimensions lie in pairs. Logits are rows x kPanel.
struct ScoreKernels {
  bool narrow;  // queries and keys in bfloat16 are multiplied as they are; else all are float32
  // One query, `step` bytes from one number to the next, to a row of queries.
  void (*put_query)(Number, const void* from, int64_t step, int dim, bool narrow, void* row);
  // Keys into the panels.
  void (*put_keys)(const Format&, const Rows&, bool narrow, void* panels);
  // logits = queries . keys, of a multiple of kTile rows
  void (*products)(const void* queries, int rows, int dim, bool narrow, const void* panel,
                   float* logits);
  // logits = scale * logits - lse, p = exp(logits)
  void (*soften)(float* logits, int rows, float scale, const float* lse, float* p);
  // Adds to sums[i] the group's terms of the queries that count for token i: those from start[i]
  // on. Of the largest sum there is one for each of the group, kBlock apart.
  void (*observe)(const float* p, const float* logits, const HeldRows&, const int* start, Term, Group,
                  float above, float* sums);
};

// Bytes of a row of queries, and of a panel.
constexpr int row_bytes(int dim, bool narrow) {
  return narrow ? padded((dim + 1) / 2) * 4 : padded(dim) * 4;
}
constexpr int panel_bytes(int dim, bool narrow) {
  return (narrow ? (dim + 1) / 2 : dim) * kPanel * 4;
}

extern const ScoreKernels plain_scores;
#ifdef KV_X86
extern const ScoreKernels avx2_scores;
extern const ScoreKernels avx512_scores;
extern const ScoreKernels bf16_scores;
extern const ScoreKernels amx_scores;
extern const ScoreKernels amx_emulated_scores;
#endif

}  // namespace kv
