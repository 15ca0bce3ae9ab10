"""ASGI middleware for `vllm serve --middleware` that checks requests before the server does."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from fastapi import HTTPException

from kv_serve.vllm import names, requests
from kv_serve.vllm.nearest import strangers

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PATH: Final = "kv_serve.vllm.middleware.BudgetCheck"
BAD_REQUEST: Final = 400

# A cheap filter, as prompts may be long and most requests have no name of ours. A name may contain
# escapes, and a JSON text has zero bytes only in UTF-16 and UTF-32.
_MAY_NAME: Final = re.compile(rb'"\s*kv|\\u|\x00', re.IGNORECASE)


class BudgetCheck:
    """ASGI middleware that answers a request with a bad `kv_budget` with status 400.

    It parses the body like the server, so it rejects a streaming request before the stream starts,
    and names beside the prompt, which vLLM drops. `admission` checks the parsed request on every
    route. The check runs while the server reads the body, so vLLM's earlier checks, such as the API
    key, apply first. It raises an HTTP exception, so vLLM formats the response.
    """

    def __init__(self, app: App) -> None:
        """Wrap `app`."""
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forward every event, and check a body when it is complete."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        parts: list[bytes] = []

        async def looking() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    body = b"".join(parts)
                    parts.clear()
                    check(body, scope["app"].state.vllm_config.additional_config)
            return message

        await self.app(scope, looking, send)


def check(body: bytes, config: Mapping[str, object]) -> None:
    """Raise if the budget in a body is invalid for the engine's policy.

    Args:
        body: of any request; a body that is not JSON is ignored.
        config: the engine's `additional_config`.

    Raises:
        HTTPException: with status 400 and a message.
    """
    if _MAY_NAME.search(body) is None:
        return
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return  # a form, or a body that the server rejects itself
    if not isinstance(given, dict):
        return
    try:
        _check(given, config.get(names.KEY))
    except ValueError as error:
        raise HTTPException(BAD_REQUEST, str(error)) from error


def _check(given: Mapping[str, object], policy: object) -> None:
    sampling = given.get("sampling_params")
    inner: Mapping[str, object] = sampling if isinstance(sampling, dict) else {}
    _check_beside(given, "vllm_xargs")
    _check_beside(inner, "extra_args of sampling_params")
    for found in (given.get("vllm_xargs"), inner.get("extra_args")):
        if not isinstance(found, dict):
            continue
        if policy is not None:
            requests.requested_budget(requests.policy_of(str(policy)), found)
            requests.requested_prefix(found)
        for name in (each for each in requests.NAMES if found.get(each) is not None):
            if policy is None:
                raise ValueError(f"this server has no policy, so {name} has no effect")
            if given.get("use_beam_search"):
                raise ValueError(
                    f"vLLM's beam search drops vllm_xargs, and {name} with it; omit one of the two"
                )


def _check_beside(given: Mapping[str, object], place: str) -> None:
    """Raise if a name of ours is in a place where vLLM drops it."""
    for name, near in strangers(given, (), (*requests.NAMES, *names.SETTINGS)):
        if near in names.SETTINGS:
            requests.check_names({name: given[name]})
        raise ValueError(f"{name} has no effect here; a request may set {near} in {place}")
