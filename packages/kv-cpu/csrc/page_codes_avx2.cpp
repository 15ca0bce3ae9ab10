#include "page_codes.inc"

namespace kv {

extern const CodeKernels avx2_codes = {rotate, largest};

}  // namespace kv
