#include "page_codes.inc"

namespace kv {

extern const CodeKernels avx2_codes = {turn, largest};

}  // namespace kv
