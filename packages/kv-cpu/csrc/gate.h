// Scores of tokens by a gate: for every KV head a network of a token's key before RoPE, its value
// and norms of both. Plain structs, as in attention.h.
#pragma once

#include "attention.h"

namespace kv {

constexpr int kRows = 12;         // tokens whose products are computed together
constexpr int kScalars = 5;       // the last features, which are not vectors
constexpr int kMostUnits = 4096;  // of the hidden layer

// The pairs of dimensions that a rotary embedding rotates.
struct Rotation {
  int pairs;
  int apart;               // pair i is (i, i + apart); 0: as listed in `pair`
  const float* frequency;  // padded to a multiple of kLanes
  const int* pair;         // pairs x 2
  float most;              // largest frequency; infinite if one is not finite
};

// One key and its value, and the cosines and sines of its position, in padded rows.
struct GateToken {
  const uint8_t *key, *value;
  Number key_number, value_number;
  int key_dim, value_dim;
  const float *cosine, *sine;
};

// The network of one KV head: `linear` and `outer` are padded with 0 to multiples of kLanes, and
// `inner` has a padded row for each feature.
struct GateHead {
  const float *linear, *inner, *outer;
  int features, units;
};

struct GateKernels {
  // The cosines and sines of position * frequency, which is rounded to float32 as in torch.
  void (*turn)(const Rotation&, int64_t position, float* cosine, float* sine);
  // Writes a row of features: the key rotated back, the value, the norms of pairs, the scalars.
  void (*features)(const Rotation&, const GateToken&, float* row);
  // out = the network of `count` rows, at most kRows, `width` apart and padded with 0.
  void (*products)(const GateHead&, const float* rows, int width, int count, float* out);
};

extern const GateKernels plain_gate;
#ifdef KV_X86
extern const GateKernels avx2_gate;
extern const GateKernels avx512_gate;
#endif

}  // namespace kv
