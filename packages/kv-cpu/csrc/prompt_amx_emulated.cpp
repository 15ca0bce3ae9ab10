#define KV_EMULATED_TILES
#define KV_TILES
#include "prompt_tiles.inc"

namespace kv {

extern const PromptKernels amx_emulated_prompt = {
    true, kRows, put_query, pack_keys, pack_values, attend, finish, raise, mass};

}  // namespace kv
