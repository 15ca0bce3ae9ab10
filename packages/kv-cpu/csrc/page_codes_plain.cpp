#include "page_codes.inc"

namespace kv {

extern const CodeKernels plain_codes = {rotate, largest};

}  // namespace kv
