#include "prompt.inc"

namespace kv {

extern const PromptKernels avx2_prompt = {
    false, kRows, put_query, pack_keys, pack_values, attend_plainly, finish, raise, mass};

}  // namespace kv
