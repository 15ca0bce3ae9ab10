#include "amx.inc"

namespace kv {

extern const Kernels amx_kernels = {"amx", prepared_size, prepare, dot_amx, weigh_amx, soften_amx,
                                    observe, renew, widen, bound, strips, begin, end};

}  // namespace kv
