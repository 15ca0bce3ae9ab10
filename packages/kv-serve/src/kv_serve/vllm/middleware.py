"""What looks at a request before vLLM's server reads it: `vllm serve --middleware` takes it."""

import functools
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from fastapi import HTTPException

from kv_policy import KVPolicy, parse
from kv_serve.vllm import plugin, requests

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PATH: Final = "kv_serve.vllm.middleware.BudgetCheck"
BAD_REQUEST: Final = 400


class BudgetCheck:
    """ASGI middleware that answers a request with a bad `kv_budget` with status 400.

    The engine never hears of such a request, and no step of it does anything for the check. It is
    made while the server reads the body, so whatever vLLM looks at first, such as an API key, comes
    first; and as what it raises is an HTTP exception, the answer is one of vLLM's own.
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
    # Prompts may be long, and most of them ask for no budget; \u may spell any key.
    if requests.KEY.encode() not in body and b"\\u" not in body:
        return
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return  # a form, or something for which the server has its own words
    extra = _extra_args(given)
    if extra.get(requests.KEY) is None:
        return
    text = config.get(plugin.KEY)
    try:
        if text is None:
            raise ValueError(f"this server has no policy, so {requests.KEY} has no meaning")
        requests.requested_budget(_policy(str(text)), extra)
    except ValueError as error:
        raise HTTPException(BAD_REQUEST, str(error)) from error


@functools.cache
def _policy(text: str) -> KVPolicy:
    return parse(text)  # looks through what is installed, and a server has one policy


def _extra_args(given: object) -> Mapping[str, object]:
    """Find vLLM's extra arguments, which the routes with tokens name as `SamplingParams` does."""
    if not isinstance(given, dict):
        return {}
    sampling = given.get("sampling_params")
    inner = sampling.get("extra_args") if isinstance(sampling, dict) else None
    found = given.get("vllm_xargs") or inner
    return found if isinstance(found, dict) else {}
