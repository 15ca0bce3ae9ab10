#include "page_codes.inc"

namespace kv {

extern const CodeKernels vnni_codes = {rotate, largest};

}  // namespace kv
