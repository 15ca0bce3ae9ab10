#include "page_codes.inc"

namespace kv {

extern const CodeKernels dotprod_codes = {rotate, largest};

}  // namespace kv
