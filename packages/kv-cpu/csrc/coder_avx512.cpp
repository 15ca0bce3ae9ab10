#include "coder.inc"

namespace kv {

extern const Coder avx512_coder = {encode, decode, recode};

}  // namespace kv
