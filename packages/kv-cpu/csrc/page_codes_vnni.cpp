#include "page_codes.inc"

namespace kv {

extern const CodeKernels vnni_codes = {turn, largest};

}  // namespace kv
