"""Reading the policy of a vLLM configuration, and checks of whether it can be served."""

from collections.abc import Mapping

from vllm import __version__
from vllm.config import KVTransferConfig, VllmConfig

from kv_attention import check_backend
from kv_policy import CacheShape, KVPolicy, TokenFormat, complete, keeps_shape, parse, tier_formats
from kv_runtime import AUTO
from kv_serve.vllm.attach import stores_prefixes
from kv_serve.vllm.beside import refused_connector, refused_drafts
from kv_serve.vllm.names import BACKEND, DOCUMENTS, KEY, POISON, SETTINGS, TURNS
from kv_serve.vllm.nearest import strangers
from kv_serve.vllm.versions import SERVED, is_served


class UnservableError(ValueError):
    """The policy cannot be served with this vLLM, model or configuration."""


def served_policy(config: VllmConfig) -> KVPolicy:
    """Read the policy in `additional_config`, and check that the engine can serve it.

    Raises:
        UnknownPolicyError: the name is not installed; the message lists the installed ones.
        UnservableError: the vLLM version, the configuration or the policy is not supported.
        ValueError: the text is not a policy, or the backend is unknown or unavailable.
    """
    check_version(__version__)
    check_settings(config.additional_config)
    policy = parse(config.additional_config[KEY])
    check_engine(config, policy)
    named = config.additional_config.get(BACKEND, AUTO)
    if named != AUTO:
        check_backend(named, config.device_config.device_type)
    return policy


def check_settings(given: object) -> None:
    """Raise if settings in `additional_config` were meant for kv-serve but are invalid.

    Args:
        given: the value of `additional_config`, of any plugin; a value that is not a mapping is
            ignored.

    Raises:
        UnservableError: a setting has the wrong type or an unknown name.
    """
    if not isinstance(given, Mapping):
        return
    for name, near in strangers(given, SETTINGS, SETTINGS):
        raise UnservableError(
            f"additional_config has {name}, which kv-serve does not know; did you mean {near}?"
        )
    text, backend = given.get(KEY), given.get(BACKEND, AUTO)
    if KEY in given and not isinstance(text, str):
        raise UnservableError(
            f'{KEY} is {text!r}; give a policy\'s text, for example {{"{KEY}": "k8v4"}}'
        )
    folder = given.get(DOCUMENTS)
    if folder is not None and not isinstance(folder, str):
        raise UnservableError(f"{DOCUMENTS} is {folder!r}; give the path of a folder")
    for name in (POISON, TURNS):
        if not isinstance(given.get(name, False), bool):
            raise UnservableError(f"{name} is {given[name]!r}; give true or false")
    if not isinstance(backend, str):
        raise UnservableError(f"{BACKEND} is {backend!r}; give the name of a backend")
    for name in (TURNS, DOCUMENTS):
        if given.get(name) and KEY not in given:
            raise UnservableError(
                f"{name} is given and there is no {KEY}, without which vLLM's own prefix cache "
                f"serves turns and documents; give a {KEY}, or omit {name}"
            )
    if backend != AUTO and KEY not in given:
        raise UnservableError(
            f"{BACKEND} is {backend} and there is no {KEY}, without which vLLM's own attention "
            f"runs; give a {KEY}, or omit {BACKEND}"
        )


def check_version(version: str) -> None:
    """Raise if this version of vLLM is not supported.

    Raises:
        UnservableError: the version is not supported.
    """
    if not is_served(version):
        raise UnservableError(
            f"policies need {SERVED}, but vLLM {version} is installed; install one of those, or "
            f"remove {KEY} from additional_config"
        )


def plain_format(policy: KVPolicy, shape: CacheShape) -> TokenFormat | None:
    """Return the format of a policy that has one for all tokens, encoded independently.

    Each token is then stored in its vLLM slot, and prefixes can be shared. A basis is allowed that
    keeps the shape of vectors. None: the stored bytes depend on more than the token, or pages are
    read as their keys rank them.
    """
    formats = policy.formats
    whole = policy.selector is None and policy.reading is None and keeps_shape(policy.basis)
    if not whole or not policy.capabilities.shares_prefixes:
        return None
    first, *others = tier_formats(policy, shape)
    window = formats.window if formats is not None else 0
    return None if others or window or first.block != 1 else first


def is_plain(policy: KVPolicy) -> bool:
    """Return whether a policy has a plain format, before the model's shape is known.

    Head sizes determine the bytes per token and whether a format supports them, but not the number
    of formats.
    """
    try:
        return plain_format(policy, CacheShape(1, 1, 1, 128, 128)) is not None
    except ValueError:  # checked again when the model is known
        return True


def check_engine(config: VllmConfig, policy: KVPolicy) -> None:
    """Raise if an option of the engine would share, move, split or reinterpret our pages.

    Raises:
        UnservableError: the message names the option; or the policy reads prompts a second time.
    """
    if policy.selector is not None and complete(policy.selector).replay is not None:
        raise UnservableError(
            f"the policy {policy} reads each prompt a second time, which vLLM does not do; use "
            "kv_serve.CompressedCache with a model of transformers, or a policy that reads prompts "
            "once, such as kv-compress"
        )
    model, parallel = config.model_config, config.parallel_config
    value_dim = getattr(model.hf_text_config, "v_head_dim", None)
    unlike = not model.use_mla and value_dim not in (None, model.get_head_size())
    wrong = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "a model without attention": model.is_attention_free,
        "a pooling model, which generates nothing that a cache is for": model.runner_type
        == "pooling",
        "kv_sharing_fast_prefill": config.cache_config.kv_sharing_fast_prefill,
        "keys and values of unlike dimensions, for which vLLM has backends of its own": unlike,
    }
    plain = is_plain(policy)
    refused = (
        *(name for name, given in wrong.items() if given),
        refused_drafts(config, policy, plain=plain),
        refused_connector(config, plain=plain),
    )
    for what in (each for each in refused if each is not None):
        raise UnservableError(f"the policy {policy} cannot be served with {what}")
    for name in (TURNS, DOCUMENTS):
        if config.additional_config.get(name) and not stores_prefixes(config, plain=plain):
            raise UnservableError(
                f"{name} is given, but prefix caching is disabled in this engine; enable it "
                "(--enable-prefix-caching), or omit the setting"
            )
    if plain and config.additional_config.get(DOCUMENTS):
        raise UnservableError(
            f"{DOCUMENTS} is given, but under {policy} tokens are in vLLM's slots, into which no "
            "file is loaded; omit it (vLLM's prefix cache shares what requests have read), or "
            "use another policy"
        )
    if model.use_mla:
        _check_latents(policy, config.device_config.device_type)
    if not plain:
        _check_failures(config.kv_transfer_config)
    check_dtype(config.cache_config.cache_dtype)


def _check_latents(policy: KVPolicy, device: str) -> None:
    if device != "cpu":
        raise UnservableError(
            f"this model has latent attention (MLA), which a {KEY} supports on a CPU alone, and "
            f"this engine runs on {device}; remove {KEY} from additional_config"
        )
    if not is_plain(policy) or policy.basis is not None:
        raise UnservableError(
            f"the policy {policy} cannot be served with latent attention (MLA), whose one vector "
            "per token is in vLLM's slots; use one format for all tokens, such as k8v4"
        )


def _check_failures(given: KVTransferConfig | None) -> None:
    if given is not None and given.kv_load_failure_policy != "fail":
        raise UnservableError(
            f"kv_load_failure_policy is {given.kv_load_failure_policy}, but with a {KEY} a request "
            "whose tokens cannot be stored fails; omit the option"
        )


def check_dtype(cache_dtype: str) -> None:
    """Raise if vLLM's own option also sets how keys and values are stored.

    Raises:
        UnservableError: vLLM's own kv_cache_dtype is set, by an option or by the checkpoint.
    """
    if cache_dtype != "auto":
        raise UnservableError(
            f"kv_cache_dtype is {cache_dtype} and {KEY} is given too; only one of them can set how "
            "keys and values are stored: leave kv_cache_dtype at auto, or remove the policy"
        )
