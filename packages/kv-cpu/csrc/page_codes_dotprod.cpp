#include "page_codes.inc"

namespace kv {

extern const CodeKernels dotprod_codes = {turn, largest};

}  // namespace kv
