"""Valid budgets of requests, and the errors of invalid ones."""

import pytest

from kv_policy import Budget, parse
from kv_serve.vllm.requests import check_pooling, requested_budget


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        (512, Budget(512)),
        (512.0, Budget(512)),
        ("512", Budget(512)),
        ("25%", Budget(25, "percent")),
        (" 12.5% ", Budget(12.5, "percent")),
        ("5760B", Budget(5760, "bytes")),
        (36, Budget(36)),  # equal to the protected tokens
        ("1%", Budget(1, "percent")),  # a share is at least the protected tokens
    ],
)
def test_a_budget_is_a_number_or_a_text(given: object, budget: Budget) -> None:
    assert requested_budget(parse("snapkv:window=36+k8v4"), {"kv_budget": given}) == budget


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {"kv_budget": None}])
def test_a_request_without_one_has_the_policys(extra: dict[str, object] | None) -> None:
    for policy in ("snapkv", "k8v4"):
        assert requested_budget(parse(policy), extra) is None


@pytest.mark.parametrize(
    ("policy", "given", "sentence"),
    [
        ("snapkv", "many", "kv_budget: budget 'many' is not understood; write tokens as 1024"),
        ("snapkv", "-1", "kv_budget: budget '-1' is not understood"),
        ("snapkv", "1e999", "kv_budget: budget is inf tokens; it must be a number above 0"),
        ("snapkv", 0, "kv_budget: budget is 0 tokens; it must be a number above 0"),
        ("snapkv", 100.5, "kv_budget: budget is 100.5 tokens; tokens are whole"),
        ("snapkv", float("nan"), "kv_budget: budget is nan tokens; it must be a number above 0"),
        ("snapkv", 7e18, "kv_budget: budget is 7e[+]18 tokens; use at most 2147483647, or 100%"),
        ("snapkv", "9e290B", "kv_budget: budget is 9e[+]290 bytes; use at most 2147483647"),
        ("snapkv", "8e18B", "kv_budget: budget is 8e[+]18 bytes; use at most 2147483647"),
        ("snapkv", 10**400, "kv_budget: budget is 10000.* tokens; use at most 2147483647"),
        ("snapkv", "101%", "kv_budget: budget is 101%; a share is at most 100%"),
        ("snapkv", True, "kv_budget is True; give tokens per head as 1024"),
        ("snapkv", [64], r"kv_budget is \[64\]; give tokens per head as 1024"),
        ("snapkv:window=36", 35, "a budget of 35 tokens is smaller than the 36 that snapkv"),
        ("k8v4", 512, "k8v4 keeps every token, so a budget of 512 has no effect"),
        ("k8v4", "25%", "k8v4 keeps every token, so a budget of 25% has no effect"),
    ],
)
def test_a_bad_budget_is_refused_with_a_sentence(policy: str, given: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        requested_budget(parse(policy), {"kv_budget": given})


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"kv_buget": 64}, "kv_buget is not a request argument and would have no effect; did"),
        ({"kv_cache": 64}, "kv_cache is not a request argument"),
        ({"kv_policy": "k8v4"}, "kv_policy is set for all requests when the engine starts"),
        ({"kv_transfer_params": "mine"}, "keys and values are not sent between engines; omit"),
    ],
)
def test_a_name_that_would_change_nothing_is_refused(
    extra: dict[str, object], sentence: str
) -> None:
    for policy in ("snapkv", "k8v4"):
        with pytest.raises(ValueError, match=sentence):
            requested_budget(parse(policy), extra)


def test_a_request_that_generates_nothing_has_no_budget() -> None:
    check_pooling({"mine": 1})
    for extra in ({"kv_budget": 64}, {"kv_buget": 64}):
        with pytest.raises(ValueError, match=r"kv_budget applies to requests that|kv_buget is not"):
            check_pooling(extra)
