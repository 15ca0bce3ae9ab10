"""Checks of configurations and requests inside vLLM's `InputProcessor`.

vLLM creates an `InputProcessor` from a configuration before it starts an engine, and passes every
request through it: from its servers on any route, from batch files and from `LLM`. It has no hook
there, so two of its methods are patched. At that point vLLM has parsed the request.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kv_serve.vllm import names
from kv_serve.vllm.extending import extend

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor


def watch() -> None:
    """Patch vLLM's `InputProcessor` with the checks of kv-serve; may be called repeatedly."""
    from vllm.v1.engine.input_processor import InputProcessor

    extend(InputProcessor, "__init__", _made)
    extend(InputProcessor, "process_inputs", _admitted)


def _made(
    make: Callable[..., None],
    self: "InputProcessor",
    vllm_config: "VllmConfig",
    *more: Any,
    **options: Any,
) -> None:
    check_configuration(vllm_config)
    make(self, vllm_config, *more, **options)


def _admitted(
    admit: Callable[..., "EngineCoreRequest"],
    self: "InputProcessor",
    request_id: str,
    prompt: Any,
    params: Any,
    *more: Any,
    **options: Any,
) -> "EngineCoreRequest":
    check_request(self.vllm_config, params, goes_on=bool(options.get("resumable")))
    made = admit(self, request_id, prompt, params, *more, **options)
    check_prefix(self.vllm_config, made)
    return made


def check_configuration(config: "VllmConfig") -> None:
    """Raise if the policy of a configuration cannot be served; without a policy, do nothing.

    Raises:
        ValueError: the message gives the reason.
    """
    from kv_serve.vllm.config import check_settings, served_policy

    check_settings(config.additional_config)
    if _policy_of(config) is not None:
        served_policy(config)


def check_request(
    config: "VllmConfig", params: "SamplingParams | PoolingParams", *, goes_on: bool
) -> None:
    """Raise if a request is invalid for the engine's policy; without a policy, do nothing.

    Args:
        config: the engine's.
        params: the request's parameters.
        goes_on: whether the request is resumable, that is, more prompt tokens follow its answer.

    Raises:
        VLLMValidationError: vLLM's own, so its servers answer with status 400 and the message.
    """
    text = _policy_of(config)
    if text is None:
        return
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    from kv_serve.vllm.requests import (
        check_pooling,
        policy_of,
        requested_budget,
        requested_prefix,
    )

    try:
        if isinstance(params, SamplingParams):
            requested_budget(policy_of(text), params.extra_args)
            requested_prefix(params.extra_args)
        else:
            check_pooling(params.extra_kwargs or {})
    except ValueError as error:
        raise VLLMValidationError(str(error)) from error
    if goes_on:
        raise VLLMValidationError(
            f"a {names.KEY} needs the whole prompt in one request, but this one streams its "
            "input; send each turn as a separate request"
        )


def check_prefix(config: "VllmConfig", request: "EngineCoreRequest") -> None:
    """Raise if a request names first tokens that it does not have, or that the engine cannot share.

    Raises:
        VLLMValidationError: as `check_request`.
    """
    text, params = _policy_of(config), request.sampling_params
    if text is None or params is None or not params.extra_args:
        return
    from vllm.exceptions import VLLMValidationError

    from kv_serve.vllm.attach import stores_prefixes
    from kv_serve.vllm.config import is_plain
    from kv_serve.vllm.requests import TOKENS_ALONE, policy_of, requested_prefix

    boundary, ids = requested_prefix(params.extra_args), request.prompt_token_ids
    if boundary is None:
        return
    if not stores_prefixes(config, plain=is_plain(policy_of(text))):
        raise VLLMValidationError(
            f"{names.PREFIX} needs prefix caching, which is disabled in this engine; enable it "
            "(--enable-prefix-caching), or omit the argument"
        )
    if ids is None or request.mm_features:
        raise VLLMValidationError(f"{names.PREFIX} {TOKENS_ALONE}")
    if boundary > len(ids):
        raise VLLMValidationError(
            f"{names.PREFIX} is {boundary}, but the prompt has {len(ids)} tokens; give at most as "
            "many"
        )


def _policy_of(config: "VllmConfig") -> str | None:
    given = config.additional_config
    return given.get(names.KEY) if isinstance(given, dict) else None
