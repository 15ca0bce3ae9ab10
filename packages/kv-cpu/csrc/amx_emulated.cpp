#define KV_EMULATED_TILES
#include "amx.inc"

namespace kv {

extern const Kernels amx_emulated_kernels = {
    "amx-emulated", prepared_size, prepare, dot_amx, weigh_amx, soften_amx, observe, renew, widen,
    bound, strips, begin, end};

}  // namespace kv
