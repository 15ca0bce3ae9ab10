#include "prompt.inc"

namespace kv {

extern const PromptKernels avx2_prompt = {false, put_query, pack_keys, pack_values, attend, raise};

}  // namespace kv
