#include "prompt.inc"

namespace kv {

extern const PromptKernels avx512_prompt = {
    false, put_query, pack_keys, pack_values, attend, raise};

}  // namespace kv
