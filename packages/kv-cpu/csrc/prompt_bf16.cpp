#include "prompt.inc"

namespace kv {

extern const PromptKernels bf16_prompt = {true, put_query, pack_keys, pack_values, attend, raise};

}  // namespace kv
