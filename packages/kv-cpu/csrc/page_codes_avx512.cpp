#include "page_codes.inc"

namespace kv {

extern const CodeKernels avx512_codes = {rotate, largest};

}  // namespace kv
