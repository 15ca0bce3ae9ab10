#include "page_codes.inc"

namespace kv {

extern const CodeKernels neon_codes = {rotate, largest};

}  // namespace kv
