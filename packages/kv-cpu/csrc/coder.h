// Encoding and decoding of vectors, in plain structs: this is compiled once for each instruction
// set.
#pragma once

#include <cstdint>

#include "attention.h"

namespace kv {

// Stored rows are consecutive: codes (or plain numbers) and, separately, metadata.
struct Coder {
  // Encodes the vectors at `x`, numbers of the kind `from`, to `count` rows.
  void (*encode)(const Format&, Number from, const uint8_t* const* x, int count, uint8_t* codes,
                 uint8_t* meta);
  // Decodes a row to float32.
  void (*decode)(const Format&, const uint8_t* codes, const uint8_t* meta, float* to);
  // Encodes the rows at `codes` and `meta`, of a format with as many dimensions, to `count` rows.
  void (*recode)(const Format& from, const uint8_t* const* codes, const uint8_t* const* meta,
                 const Format& to, int count, uint8_t* new_codes, uint8_t* new_meta);
};

extern const Coder plain_coder;
#ifdef KV_X86
extern const Coder avx2_coder;
extern const Coder avx512_coder;
#endif

// The coder of an instruction set, if the processor supports it; null otherwise.
const Coder* coder(const char* isa);

}  // namespace kv
