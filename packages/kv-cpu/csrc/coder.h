// How vectors become bytes and numbers again, in plain structs: this is compiled once for each
// instruction set.
#pragma once

#include <cstdint>

#include "attention.h"

namespace kv {

// Stored rows lie one behind the other: codes (or plain numbers) and, apart from them, metadata.
struct Coder {
  // The vectors that `x` points to, numbers of the kind `from`, to `count` rows.
  void (*encode)(const Format&, Number from, const uint8_t* const* x, int count, uint8_t* codes,
                 uint8_t* meta);
  // A row, as float32.
  void (*decode)(const Format&, const uint8_t* codes, const uint8_t* meta, float* to);
};

extern const Coder plain_coder;
#ifdef KV_X86
extern const Coder avx2_coder;
extern const Coder avx512_coder;
#endif

// The coder of an instruction set that this processor can run; null if it cannot.
const Coder* coder(const char* isa);

}  // namespace kv
