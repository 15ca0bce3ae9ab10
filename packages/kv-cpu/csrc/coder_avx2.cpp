#include "coder.inc"

namespace kv {

extern const Coder avx2_coder = {encode, decode, recode};

}  // namespace kv
