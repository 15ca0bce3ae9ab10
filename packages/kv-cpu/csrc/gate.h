// Scores of tokens by a gate: for every KV head a network of a token's key before RoPE, its value
// and norms of both. Plain structs, as in attention.h.
#pragma once

#include "attention.h"

namespace kv {

constexpr int kRows = 12;         // tokens whose products are computed together
constexpr int kScalars = 5;       // the last features, which are not vectors
constexpr int kMostUnits = 4096;  // of the hidden layer

// The pairs of dimensions that a rotary embedding rotates. No dimension is in two of them.
struct Rotation {
  int pairs, alone;        // and the dimensions of no pair
  int apart;               // pair i is (i, i + apart); 0: as listed in `dims`
  const int* dims;         // pairs x 2, and those of no pair
  const float* frequency;  // padded to a multiple of kLanes
  float most;              // largest frequency; infinite if one is not finite

  int norms() const { return pairs + alone; }
};

// One key and its value, and the cosines and sines of its position, in padded rows.
struct GateToken {
  const uint8_t *key, *value;
  Number key_number, value_number;
  int key_dim, value_dim;
  const float *cosine, *sine;
};

// The network of one KV head. As given, its features are the key, the value, a norm for each
// dimension of the key and the scalars; packed, there is one norm for each pair.
struct GateHead {
  const float *linear, *inner, *outer;
  int key_dim, value_dim, units;
};

struct PackedHead {
  float *linear, *inner, *outer;  // rows are padded with 0 to multiples of kLanes
  int features, units;
};

struct GateKernels {
  // The cosines and sines of position * frequency, which is rounded to float32 as in torch.
  void (*turn)(const Rotation&, int64_t position, float* cosine, float* sine);
  // Writes a padded row of packed features: the key rotated back, the value, norms, the scalars.
  void (*features)(const Rotation&, const GateToken&, float* row);
  // Writes the rows of a packed head; the padding of `inner` and `outer` is 0 already.
  void (*pack)(const Rotation&, const GateHead&, const PackedHead&);
  // out = the network of `count` rows of features, at most kRows, `width` apart.
  void (*products)(const PackedHead&, const float* rows, int width, int count, float* out);
};

extern const GateKernels plain_gate;
#ifdef KV_X86
extern const GateKernels avx2_gate;
extern const GateKernels avx512_gate;
#endif

}  // namespace kv
