#include "tile_products.inc"

namespace kv {

extern const ScoreKernels amx_scores = {
    true, put_query, put_keys, tiled_products, soften_rows, observe_rows};

}  // namespace kv
