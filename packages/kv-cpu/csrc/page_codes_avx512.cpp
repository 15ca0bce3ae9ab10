#include "page_codes.inc"

namespace kv {

extern const CodeKernels avx512_codes = {turn, largest};

}  // namespace kv
