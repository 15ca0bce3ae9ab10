"""Names that kv-serve is given by: in a configuration, in a request, and to vLLM."""

from typing import Final

KEY: Final = "kv_policy"  # of a policy's text in `additional_config`
POISON: Final = "kv_poison"  # there, true: free pages are filled with NaN, to find who reads them

# Of a request's extra arguments, for `forcing`: the tokens that it generates, to measure an engine.
FORCED: Final = "kv_serve_forced"

# What kv-serve reads in `additional_config`; other names that begin so are refused.
SETTINGS: Final = (KEY, POISON)

# What vLLM calls its attention on a CPU, and our class in its place: the stock one until a
# configuration names a policy.
OVERRIDES: Final = {
    "CPU_ATTN": "kv_serve.vllm.switch.CpuBackend",
    "CPU_MLA": "kv_serve.vllm.latent.CpuLatentBackend",
    "AMX_MLA": "kv_serve.vllm.latent.AmxLatentBackend",
}

# On a GPU vLLM leaves a name free for backends like ours, and `--attention-backend CUSTOM` asks for
# it; nothing stands behind that name unless it is registered.
CUSTOM: Final = "kv_serve.vllm.custom.CustomBackend"
