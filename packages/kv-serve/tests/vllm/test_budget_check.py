"""The middleware in front of vLLM's server, whose answers have vLLM's error format."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

LONG = "word " * 1000


def app(policy: str | None) -> Any:
    """Return a server with one route that echoes its input."""
    from fastapi import FastAPI
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

    from kv_serve.vllm.middleware import BudgetCheck

    made = FastAPI()
    made.state.args = SimpleNamespace(log_error_stack=False)
    config = {} if policy is None else {"kv_policy": policy}
    made.state.vllm_config = SimpleNamespace(additional_config=config)

    async def echo(given: dict[str, Any]) -> dict[str, Any]:
        return given

    made.post("/v1/completions")(echo)
    made.get("/v1/models")(lambda: {"models": []})
    init_exception_handler(made)
    made.add_middleware(BudgetCheck)
    return made


def sent(policy: str | None, body: bytes, chunk: int = 1 << 20) -> tuple[int, Any]:
    """Send a body in pieces, and return the status and the answer."""
    import asyncio

    import httpx

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), chunk):
            yield body[start : start + chunk]

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app(policy))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            kind = {"Content-Type": "application/json"}
            return await client.post("/v1/completions", content=pieces(), headers=kind)

    answer = asyncio.run(ask())
    return answer.status_code, answer.json()


def asked(budget: object, **more: object) -> dict[str, object]:
    return {"prompt": "The", "vllm_xargs": {"kv_budget": budget}, **more}


@pytest.mark.parametrize(
    "given",
    [
        asked(512),
        asked("25%"),
        asked("5760B", prompt=LONG),
        {"prompt": LONG},
        {"prompt": "kv_budget"},
        {"prompt": "kv_budget", "vllm_xargs": None},
        {"prompt": "kv_budget", "vllm_xargs": "not a table"},
        {"sampling_params": {"extra_args": {"kv_budget": 64}}},
    ],
)
def test_what_is_right_goes_through_as_it_came(given: dict[str, object]) -> None:
    assert sent("snapkv+k8v4", json.dumps(given).encode(), chunk=100) == (200, given)


@pytest.mark.parametrize(
    ("policy", "given", "sentence"),
    [
        ("snapkv", asked("much"), "kv_budget: budget 'much' is not understood"),
        ("snapkv", asked("much", prompt=LONG), "kv_budget: budget 'much' is not understood"),
        ("snapkv", asked(8), "a budget of 8 tokens is smaller than the 32 that snapkv protects"),
        ("k8v4", asked(512), "k8v4 keeps every token, so a budget of 512 has no effect"),
        (None, asked(512), "this server has no policy, so kv_budget has no effect"),
        (
            "snapkv",
            {"sampling_params": {"extra_args": {"kv_budget": 0}}},
            "kv_budget: budget is 0 tokens",
        ),
    ],
)
def test_a_bad_budget_is_answered_by_vllms_own_error(
    policy: str | None, given: dict[str, object], sentence: str
) -> None:
    status, answer = sent(policy, json.dumps(given).encode(), chunk=100)
    assert status == 400
    assert answer["error"]["code"] == 400
    assert answer["error"]["message"].startswith(sentence)


def test_a_key_may_be_spelled_in_escapes() -> None:
    body = json.dumps(asked("much")).replace("kv_budget", r"kv\u005fbudget").encode()
    assert sent("snapkv", body)[0] == 400


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-le"])
def test_a_body_is_read_in_whatever_encoding_the_server_reads(encoding: str) -> None:
    for budget, status in (("9e290B", 400), (7e18, 400), ("25%", 200)):
        body = json.dumps(asked(budget)).encode(encoding)
        assert sent("snapkv", body, chunk=7)[0] == status


def test_of_a_name_that_comes_twice_the_last_counts_as_for_the_server() -> None:
    twice = b'{"prompt": "The", "vllm_xargs": {"kv_budget": %b, "kv_budget": %b}}'
    assert sent("snapkv", twice % (b"512", b'"much"'))[0] == 400
    assert sent("snapkv", twice % (b'"much"', b"512"))[0] == 200


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"vllm_xargs": {"kv_buget": 512}},
            "kv_buget is not a request argument and would have no effect; did you mean kv_budget",
        ),
        ({"vllm_xargs": {"KV-Budget": 512}}, "KV-Budget is not a request argument"),
        ({"vllm_xargs": {"kvbudget": 512}}, "kvbudget is not a request argument"),
        (
            {"vllm_xargs": {"kv_policy": "k8v4"}},
            "kv_policy is set for all requests when the engine starts; a request may only set",
        ),
        ({"kv_budget": 512}, "kv_budget has no effect here; a request may set kv_budget"),
        ({"kv_policy": "raw"}, "kv_policy is set for all requests when the engine starts"),
        (
            {"sampling_params": {"kv_budget": 512}},
            "kv_budget has no effect here; a request may set kv_budget in extra_args of",
        ),
        (asked(512, use_beam_search=True), "vLLM's beam search drops vllm_xargs, and kv_budget"),
    ],
)
def test_a_name_that_would_change_nothing_is_refused(
    given: dict[str, object], sentence: str
) -> None:
    status, answer = sent("snapkv", json.dumps(given).encode("utf-16"))
    assert status == 400
    assert answer["error"]["message"].startswith(sentence)


@pytest.mark.parametrize(
    "given", [{"kv_transfer_params": {}}, {"vllm_xargs": {"mine": 1, "kv_hints": 2}}]
)
def test_names_of_others_are_left_alone(given: dict[str, object]) -> None:
    assert sent("snapkv", json.dumps(given).encode()) == (200, given)


@pytest.mark.parametrize("body", [b'{"kv_budget', b"[" * 100_000 + b'"kv_budget"', b"\xff\\u"])
def test_what_is_no_json_is_left_to_the_server(body: bytes) -> None:
    status, answer = sent("k8v4", body)
    assert status == 400
    assert "kv_budget" not in str(answer)


def test_other_requests_are_not_looked_at() -> None:
    import asyncio

    import httpx

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app("k8v4"))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get("/v1/models")

    assert asyncio.run(ask()).json() == {"models": []}
