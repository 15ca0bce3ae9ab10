"""Which policy a vLLM configuration asks for, and whether it can be served."""

import re
from typing import Final

from vllm import __version__
from vllm.config import VllmConfig

from kv_policy import CacheShape, KVPolicy, TokenFormat, parse, tier_formats
from kv_serve.vllm.plugin import KEY

OLDEST: Final = (0, 30)  # the first minor version of vLLM that is served
NEWEST: Final = (0, 32)  # the last one


class UnservableError(ValueError):
    """A policy is named and cannot be served with this vLLM, model or configuration."""


def served_policy(config: VllmConfig) -> KVPolicy:
    """Read the policy that `additional_config` names, and check that the engine can serve it.

    Raises:
        UnknownPolicyError: a name that is not installed; those that are are listed.
        UnservableError: the vLLM, the configuration or the policy is not one that is served.
        ValueError: the text is not a policy's.
    """
    check_version(__version__)
    text = config.additional_config[KEY]
    if not isinstance(text, str):
        raise UnservableError(
            f'{KEY} is {text!r}; give a policy\'s text, for example {{"{KEY}": "k8v4"}}'
        )
    policy = parse(text)
    check_policy(policy)
    check_engine(config, policy)
    return policy


def check_version(version: str) -> None:
    """Refuse a vLLM whose interfaces are not known.

    Raises:
        UnservableError: a version that is not served.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        raise UnservableError(
            f"kv-serve serves policies in vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, "
            f"and this is vLLM {version}; install one of those, or remove {KEY} from "
            "additional_config"
        )


def check_policy(policy: KVPolicy) -> None:
    """Refuse what is more than one format for all tokens.

    Raises:
        UnservableError: the policy drops tokens, has a basis, several tiers or a raw window.
    """
    formats = policy.formats
    reason = None
    if policy.selector is not None:
        reason = "chooses which tokens are kept"
    elif policy.basis is not None:
        reason = "stores vectors in a basis"
    elif formats is not None and formats.tiers != 1:
        reason = f"stores tokens in {formats.tiers} tiers"
    elif formats is not None and formats.window:
        reason = f"keeps the last {formats.window} tokens raw"
    if reason is not None:
        raise UnservableError(
            f"the policy {policy} {reason}; inside vLLM only one format for all tokens is served, "
            "for example k8v4"
        )


def check_engine(config: VllmConfig, policy: KVPolicy) -> None:
    """Refuse what would share, move, split or reinterpret our pages.

    Raises:
        UnservableError: the sentence says which option it is.
    """
    parallel = config.parallel_config
    cache = config.cache_config
    wrong = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "a KV transfer connector": config.kv_transfer_config is not None,
        "a model that mixes attention with other state": config.model_config.is_hybrid,
        "prefix caching of this policy, whose tokens depend on later ones (turn it off with "
        "--no-enable-prefix-caching)": bool(cache.enable_prefix_caching)
        and not policy.capabilities.shares_prefixes,
    }
    for what in (name for name, given in wrong.items() if given):
        raise UnservableError(f"the policy {policy} cannot be served with {what}")
    check_dtype(cache.cache_dtype)


def check_dtype(cache_dtype: str) -> None:
    """Refuse a second say in how keys and values are stored.

    Raises:
        UnservableError: vLLM's own kv_cache_dtype is set, by an option or by the checkpoint.
    """
    if cache_dtype != "auto":
        raise UnservableError(
            f"kv_cache_dtype is {cache_dtype} and {KEY} is given too; only one of them can say how "
            "keys and values are stored: leave kv_cache_dtype at auto, or remove the policy"
        )


def bound_format(policy: KVPolicy, shape: CacheShape) -> TokenFormat:
    """Give the format in which the policy stores every token of heads of this shape.

    Raises:
        UnservableError: the format encodes several tokens together.
    """
    (bound,) = tier_formats(policy, shape)
    if bound.block != 1:
        raise UnservableError(
            f"the policy {policy} encodes {bound.block} tokens together; inside vLLM a token is "
            "stored when it comes, so only formats that encode single tokens are served"
        )
    return bound
