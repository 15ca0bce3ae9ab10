"""Names of kv-serve in configurations, in requests and in vLLM."""

from typing import Final

KEY: Final = "kv_policy"  # the policy's text in `additional_config`
POISON: Final = "kv_poison"  # also there; true: fill free pages with NaN, to detect reads of them
BACKEND: Final = "kv_backend"  # also there: a backend of attention and pages; `auto` by default

# In a request's extra arguments, for `forcing`: the tokens to generate, to measure an engine.
FORCED: Final = "kv_serve_forced"

# In a request's extra arguments: the number of first tokens to compress by themselves, which other
# requests continue.
PREFIX: Final = "kv_prefix"

TURNS: Final = "kv_turns"  # in `additional_config`; true: store the states of finished requests

DOCUMENTS: Final = "kv_documents"  # also there: a folder of files that `kv-serve compress` wrote

# Settings of kv-serve in `additional_config`; other names with its prefix are rejected.
SETTINGS: Final = (KEY, BACKEND, POISON, TURNS, DOCUMENTS)

# vLLM's names of its CPU attention backends, and our replacements, which use the stock
# implementation unless a policy is configured.
OVERRIDES: Final = {
    "CPU_ATTN": "kv_serve.vllm.switch.CpuBackend",
    "CPU_MLA": "kv_serve.vllm.latent.CpuLatentBackend",
    "AMX_MLA": "kv_serve.vllm.latent.AmxLatentBackend",
}

# On a GPU vLLM reserves the name CUSTOM for external backends, selected by
# `--attention-backend CUSTOM`; it is unset unless registered.
CUSTOM: Final = "kv_serve.vllm.custom.CustomBackend"
