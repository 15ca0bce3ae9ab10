#include "scores.inc"

namespace kv {

extern const ScoreKernels neon_scores = {
    false, put_query, put_keys, products, soften_rows, observe_rows};

}  // namespace kv
