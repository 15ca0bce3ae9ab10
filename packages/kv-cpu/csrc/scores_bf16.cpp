#include "narrow.inc"

namespace kv {

extern const ScoreKernels bf16_scores = {
    true, put_query, put_keys, narrow_products, soften_rows, observe_rows};

}  // namespace kv
