#include "prompt.inc"

namespace kv {

extern const PromptKernels bf16_prompt = {
    true, kRows, put_query, pack_keys, pack_values, attend_plainly, finish, raise, mass};

}  // namespace kv
