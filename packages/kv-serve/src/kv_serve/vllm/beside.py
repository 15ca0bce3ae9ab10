"""What a policy is served beside: speculative decoding, and KV connectors of vLLM."""

from pathlib import Path
from typing import Final

from vllm.config import VllmConfig

from kv_policy import KVPolicy
from kv_policy.files import write_whole
from kv_runtime import unlike_drafts
from kv_serve.vllm.attach import is_ours
from kv_serve.vllm.names import DOCUMENTS

PLAIN: Final = "one format for all tokens, such as k8v4"
# Methods of speculative decoding.
NGRAM: Final = "ngram"
DRAFTERS: Final = (NGRAM, "draft_model", "eagle", "eagle3", "mtp")
OFFLOADING: Final = "OffloadingConnector"
EXAMPLE: Final = "ExampleConnector"
FOLDER: Final = "shared_storage_path"  # of the example connector, in its extra config
CLAIM: Final = "kv_policy.txt"  # in that folder: whose keys and values it has

# What OffloadingConnector moves blocks with: vLLM's own between a GPU and the host, and ours where
# the engine itself runs on the host.
GPU_SPEC: Final = "CPUOffloadingSpec"
HOST_SPEC: Final = "HostSpec"
HOST_MODULE: Final = "kv_serve.vllm.offload"


def refused_drafts(config: VllmConfig, policy: KVPolicy, *, plain: bool) -> str | None:
    """Return with which speculative decoding a policy cannot be served, and what can be done.

    A draft that is rejected leaves a token in a slot, which a later token overwrites. That is right
    where a token's bytes depend on no other: in slots. In pages drafts are stored once they are
    right, so the policy must do nothing else with a generated token. The layers of a draft model,
    or of heads, are then vLLM's own, beside pages.

    Args:
        config: the engine's.
        policy: the policy.
        plain: whether the policy has one format for all tokens.
    """
    given = config.speculative_config
    if given is None:
        return None
    why = None if plain else unlike_drafts(policy)
    if why is not None:
        return (
            f"speculative decoding, as {why}; use a policy that plans after prompts alone, such as "
            "snapkv, or omit the speculative_config"
        )
    if config.model_config.use_mla:
        return "speculative decoding of latent attention (MLA); omit the speculative_config"
    if given.method not in DRAFTERS:
        known = f"one of the methods {', '.join(DRAFTERS)}"
        return f"speculative decoding by {given.method}; use {known}"
    if given.parallel_drafting:
        return "speculative decoding with drafts in one pass; set parallel_drafting to false"
    return None if plain or given.method == NGRAM else _refused_drafters(config, given.method)


def _refused_drafters(config: VllmConfig, method: str) -> str | None:
    """Return where the layers of a drafter are not served beside pages.

    They are vLLM's own, on a CPU. Steps scheduled ahead of the last one's answer would count drafts
    of which it is not known whether they are right.
    """
    device, instead = config.device_config.device_type, f"draft by {NGRAM}, or use {PLAIN}"
    wrong = {
        f"on {device}, as beside pages it is supported on a CPU alone; {instead}": device != "cpu",
        "and asynchronous scheduling; set async_scheduling to false": (
            config.scheduler_config.async_scheduling
        ),
        f"and vLLM's model runner V2; set VLLM_USE_V2_MODEL_RUNNER to 0, or {instead}": (
            getattr(config, "use_v2_model_runner", False)
        ),
        f"and tensor parallelism; {instead}": config.parallel_config.tensor_parallel_size > 1,
        f"and {DOCUMENTS}, which have nothing for the layers that draft; omit one of both": (
            config.additional_config.get(DOCUMENTS)
        ),
    }
    found = next((what for what, given in wrong.items() if given), None)
    return None if found is None else f"speculative decoding by {method} {found}"


def refused_connector(config: VllmConfig, *, plain: bool) -> str | None:
    """Return with which KV connector a policy cannot be served, and what can be done.

    A connector moves vLLM's blocks, which hold the tokens of a plain format alone. Those that read
    keys and values out of blocks would misread them.

    Args:
        config: the engine's.
        plain: whether the policy has one format for all tokens.
    """
    given = config.kv_transfer_config
    if given is None or is_ours(given):
        return None
    name, speculative = given.kv_connector, config.speculative_config
    if not plain:
        return f"the KV connector {name}; use {PLAIN}, or omit the kv_transfer_config"
    if config.model_config.use_mla:
        return f"the KV connector {name} and latent attention (MLA); omit the kv_transfer_config"
    if given.kv_connector_module_path is not None or name not in (OFFLOADING, EXAMPLE):
        return f"the KV connector {name}; use vLLM's {OFFLOADING} or {EXAMPLE}"
    if speculative is not None and speculative.method != NGRAM:
        return f"the KV connector {name} beside drafts of a model; draft by {NGRAM}"
    return _refused_example(config) if name == EXAMPLE else _refused_offloading(config)


def _refused_example(config: VllmConfig) -> str | None:
    assert config.kv_transfer_config is not None, "it names the connector"
    if config.scheduler_config.enable_chunked_prefill:
        return (
            f"the KV connector {EXAMPLE} and prompts in chunks, as it saves a prompt in its first "
            "step; set enable_chunked_prefill to false"
        )
    if config.parallel_config.tensor_parallel_size > 1:
        return f"the KV connector {EXAMPLE} and tensor parallelism, whose ranks share its files"
    if config.kv_transfer_config.get_from_extra_config(FOLDER, None) is None:
        return (
            f"the KV connector {EXAMPLE} in its default folder; give an empty folder as {FOLDER} "
            "in its kv_connector_extra_config"
        )
    return None


def _refused_offloading(config: VllmConfig) -> str | None:
    assert config.kv_transfer_config is not None, "it names the connector"
    extra = config.kv_transfer_config.kv_connector_extra_config
    own = HOST_SPEC, HOST_MODULE
    found = extra.get("spec_name", GPU_SPEC), extra.get("spec_module_path")
    if config.device_config.device_type == "cpu":
        if found == own:
            return None
        return (
            f"the KV connector {OFFLOADING} and its {found[0]}, with which vLLM copies from GPUs "
            f"alone; on a CPU give spec_name {HOST_SPEC} and spec_module_path {HOST_MODULE} in its "
            "kv_connector_extra_config"
        )
    if found == (GPU_SPEC, None):
        return None
    return (
        f"the KV connector {OFFLOADING} and its {found[0]}; omit spec_name, so that it is "
        f"{GPU_SPEC}"
    )


def refused_kept(config: VllmConfig, *, states: bool) -> str | None:
    """Return what a policy cannot be served with where vLLM keeps layers of a model.

    Args:
        config: the engine's.
        states: whether layers have states, which vLLM keeps of the newest tokens alone.
    """
    given = config.kv_transfer_config
    if given is not None and not is_ours(given):
        return (
            f"the KV connector {given.kv_connector} where layers of the model have a window or "
            "state of their own; omit the kv_transfer_config"
        )
    if states and config.speculative_config is not None:
        return (
            "speculative decoding where layers of the model have states; omit the "
            "speculative_config"
        )
    return None


def claim_folder(config: VllmConfig, policy: str) -> str | None:
    """Mark the example connector's folder as that of a policy and a model.

    Its files are named by tokens alone, so another policy or model would read them as its own.

    Returns:
        What the policy cannot be served with, as above, if the folder is another's.
    """
    given = config.kv_transfer_config
    if given is None or given.kv_connector != EXAMPLE:
        return None
    folder = Path(given.get_from_extra_config(FOLDER, ""))
    owner = f"{policy}\n{config.model_config.model}\n"
    claim = folder / CLAIM
    if claim.is_file():
        free = claim.read_text() == owner
    else:
        folder.mkdir(parents=True, exist_ok=True)
        free = next(folder.iterdir(), None) is None
    if not free:
        return (
            f"the KV connector {EXAMPLE} in {folder}, which has keys and values that another "
            f"policy or model stored; give an empty folder as {FOLDER}"
        )
    write_whole(claim, owner.encode())
    return None
