"""What looks at a request before vLLM's server reads it: `vllm serve --middleware` takes it."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from fastapi import HTTPException

from kv_serve.vllm import names, requests
from kv_serve.vllm.nearest import strangers
from kv_serve.vllm.policies import policy_of

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PATH: Final = "kv_serve.vllm.middleware.BudgetCheck"
BAD_REQUEST: Final = 400

# Prompts may be long, and most requests have no name of ours. A name may be spelled in escapes, and
# only in UTF-16 and UTF-32 is a byte of a JSON text zero.
_MAY_NAME: Final = re.compile(rb'"\s*kv|\\u|\x00', re.IGNORECASE)


class BudgetCheck:
    """ASGI middleware that answers a request with a bad `kv_budget` with status 400.

    It reads a body as the server does, so that a stream is refused before it has begun, and so are
    names beside the prompt, which vLLM drops. `admission` checks what vLLM has parsed, whatever the
    route and the form. It looks while the server reads the body, so whatever vLLM looks at first,
    such as an API key, comes first; and as what it raises is an HTTP exception, the answer is one
    of vLLM's own.
    """

    def __init__(self, app: App) -> None:
        """Stand in front of `app`."""
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on, and look at a body when it is complete."""
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
    """Refuse a body whose budget the engine's policy cannot go by.

    Args:
        body: of any request; what is not JSON is left to others.
        config: the engine's `additional_config`.

    Raises:
        HTTPException: with status 400 and a sentence.
    """
    if _MAY_NAME.search(body) is None:
        return
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return  # a form, or something for which the server has its own words
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
            requests.requested_budget(policy_of(str(policy)), found)
        elif found.get(requests.KEY) is not None:
            raise ValueError(f"this server has no policy, so {requests.KEY} has no meaning")
        if found.get(requests.KEY) is not None and given.get("use_beam_search"):
            raise ValueError(
                f"vLLM's beam search drops vllm_xargs, and {requests.KEY} with it; leave one of "
                "the two out"
            )


def _check_beside(given: Mapping[str, object], place: str) -> None:
    """Refuse names of ours where vLLM drops them."""
    for name, near in strangers(given, (), (requests.KEY, *names.SETTINGS)):
        if near in names.SETTINGS:
            requests.check_names({name: given[name]})
        raise ValueError(
            f"{name} would change nothing here; a request may bring {requests.KEY}, in {place}"
        )
