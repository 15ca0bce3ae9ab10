// The data of the attention-mass pass of many queries, in plain structs, as in attention.h.
#pragma once

#include "attention.h"

namespace kv {

constexpr int kPanel = 32;     // tokens whose products are computed together
constexpr int kPanels = kBlock / kPanel;
constexpr int kTile = 12;      // rows are padded to a multiple of this
constexpr int kMostRows = 96;  // maximum rows held at once, unless a group has more

// The held queries of one KV head: row i * group + g is of query first + i.
struct HeldRows {
  int queries, group, first;
  const float* lse;   // per row
  const float* even;  // per query: the uniform share of the tokens up to it
};

// The kernels of one instruction set. A panel has kPanel keys, dimension by dimension; narrow
// numbers are bfloat16, with dimensions in pairs. Logits are rows x kPanel.
struct ScoreKernels {
  bool narrow;  // bfloat16 queries and keys are multiplied directly; else all are float32
  // Converts one query, `step` bytes from one number to the next, to a row of queries.
  void (*put_query)(Number, const void* from, int64_t step, int dim, bool narrow, void* row);
  // Writes keys to the panels.
  void (*put_keys)(const Format&, const Rows&, bool narrow, void* panels);
  // logits = queries . keys, for a multiple of kTile rows
  void (*products)(const void* queries, int rows, int dim, bool narrow, const void* panel,
                   float* logits);
  // logits = scale * logits - lse, p = exp(logits); scaled logits are bounded by `most` if it is not 0
  void (*soften)(float* logits, int rows, float scale, float most, const float* lse, float* p);
  // Adds to sums[i] the group's terms of the queries that count for token i: those from start[i]
  // on. For kMaxOfSums there is one sum per head of the group, kBlock apart.
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
#elif defined(KV_ARM)
extern const ScoreKernels neon_scores;
#endif

}  // namespace kv
