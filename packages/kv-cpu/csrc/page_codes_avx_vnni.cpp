#include "page_codes.inc"

namespace kv {

extern const CodeKernels avx_vnni_codes = {rotate, largest};

}  // namespace kv
