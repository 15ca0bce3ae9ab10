#include "coder.inc"

namespace kv {

extern const Coder plain_coder = {encode, decode, recode};

}  // namespace kv
