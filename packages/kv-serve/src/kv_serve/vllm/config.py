"""Which policy a vLLM configuration asks for, and whether it can be served."""

from vllm import __version__
from vllm.config import VllmConfig

from kv_policy import CacheShape, KVPolicy, TokenFormat, parse, tier_formats
from kv_serve.vllm.attach import is_ours
from kv_serve.vllm.plugin import KEY
from kv_serve.vllm.versions import SERVED, is_served


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
    check_engine(config, policy)
    return policy


def check_version(version: str) -> None:
    """Refuse a vLLM whose interfaces are not known.

    Raises:
        UnservableError: a version that is not served.
    """
    if not is_served(version):
        raise UnservableError(
            f"kv-serve serves policies in {SERVED}, and this is vLLM {version}; install one of "
            f"those, or remove {KEY} from additional_config"
        )


def plain_format(policy: KVPolicy, shape: CacheShape) -> TokenFormat | None:
    """Give the format of a policy that has one for all tokens, each of which stands alone.

    Then a token's bytes are where vLLM says its slot is, and prefixes can be shared. None: what is
    stored depends on more than the token.
    """
    formats = policy.formats
    whole = policy.selector is None and policy.basis is None
    if not whole or not policy.capabilities.shares_prefixes:
        return None
    first, *others = tier_formats(policy, shape)
    window = formats.window if formats is not None else 0
    return None if others or window or first.block != 1 else first


def is_plain(policy: KVPolicy) -> bool:
    """Say whether a policy has a plain format, before there is a model to ask for its shape.

    Sizes of heads say how many bytes a token takes, and whether a format can serve them at all; not
    how many formats there are.
    """
    try:
        return plain_format(policy, CacheShape(1, 1, 1, 128, 128)) is not None
    except ValueError:  # refused when the model is known, if it is a reason then
        return True


def check_engine(config: VllmConfig, policy: KVPolicy) -> None:
    """Refuse what would share, move, split or reinterpret our pages.

    Raises:
        UnservableError: the sentence says which option it is.
    """
    parallel = config.parallel_config
    wrong = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "a KV transfer connector": config.kv_transfer_config is not None
        and not is_ours(config.kv_transfer_config),
        "a model that mixes attention with other state": config.model_config.is_hybrid,
    }
    for what in (name for name, given in wrong.items() if given):
        raise UnservableError(f"the policy {policy} cannot be served with {what}")
    check_dtype(config.cache_config.cache_dtype)


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
