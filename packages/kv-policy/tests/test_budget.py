from fractions import Fraction
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_policy import Budget
from kv_policy.budget import LARGEST

TOKENS = st.integers(1, 10**9).map(Budget)
PERCENT = st.floats(1e-6, 100).map(lambda amount: Budget(amount, "percent"))
BYTES = st.floats(1e-6, LARGEST).map(lambda amount: Budget(amount, "bytes"))
LENGTHS = st.lists(st.integers(0, 10**6), min_size=1, max_size=5)


@given(TOKENS | PERCENT | BYTES)
def test_text_comes_back(budget: Budget) -> None:
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("1024", 1024, "tokens"),
        (" 12 ", 12, "tokens"),
        ("1e3", 1000, "tokens"),
        ("25%", 25, "percent"),
        ("12.5%", 12.5, "percent"),
        ("100%", 100, "percent"),
        ("5760B", 5760, "bytes"),
        ("0.5b", 0.5, "bytes"),
    ],
)
def test_forms(text: str, amount: float, unit: str) -> None:
    budget = Budget.parse(text)
    assert (budget.amount, budget.unit) == (amount, unit)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "write tokens as 1024"),
        ("many", "write tokens as 1024"),
        ("-3", "write tokens as 1024"),
        ("12 %", "write tokens as 1024"),
        ("5KB", "write tokens as 1024"),
        ("0", "above 0"),
        ("0%", "above 0"),
        ("1e999", "above 0"),
        ("10.5", "tokens are whole"),
        ("101%", "at most 100%"),
        ("2147483648", "is 2147483648.0 tokens; use at most 2147483647, or 100% to keep every"),
        ("7e18", "use at most 2147483647"),
        ("9e290B", "is 9e[+]290 bytes; use at most 2147483647"),
        ("9e290%", "at most 100%"),
    ],
)
def test_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Budget.parse(text)


@given(st.integers(1, 10**6), LENGTHS, st.integers(1, 10**6))
def test_tokens_do_not_depend_on_the_length(amount: int, length: list[int], size: int) -> None:
    resolved = Budget(amount).resolve(torch.tensor(length), size, least=amount)
    assert resolved.tolist() == [amount] * len(length)


@given(st.integers(1, 100), LENGTHS, st.integers(1, 64))
def test_a_share_is_the_exact_share_rounded_down(
    percent: int, length: list[int], least: int
) -> None:
    resolved = Budget(percent, "percent").resolve(torch.tensor(length), 100, least)
    assert resolved.tolist() == [max(least, n * percent // 100) for n in length]


@pytest.mark.parametrize(("share", "length", "tokens"), [("9.2%", 750, 69), ("32.8%", 1625, 533)])
def test_a_share_that_is_whole_is_not_rounded_away(share: str, length: int, tokens: int) -> None:
    assert Budget.parse(share).resolve(torch.tensor([length]), 1).tolist() == [tokens]


@given(st.integers(1, 10**6), st.integers(1, 10**6), LENGTHS)
def test_bytes_are_never_exceeded(amount: int, token_bytes: int, length: list[int]) -> None:
    resolved = Budget(amount, "bytes").resolve(torch.tensor(length), token_bytes, least=0)
    exact = [int(Fraction(n * amount, token_bytes)) for n in length]
    assert resolved.tolist() == exact


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("budget", [Budget(LARGEST), Budget(LARGEST, "bytes")], ids=str)
def test_the_largest_budget_is_at_least_the_length(budget: Budget, dtype: torch.dtype) -> None:
    length = torch.tensor([1, 4096, 10**9, LARGEST], dtype=dtype)
    assert bool((budget.resolve(length, 1) >= length).all())


@given(
    st.sampled_from(("percent", "bytes")),
    st.integers(1, 100) | st.floats(1e-6, 100),
    st.integers(0, LARGEST),
    st.integers(1, 10**9),
)
def test_what_is_resolved_grows_with_the_budget_and_never_overflows(
    unit: Literal["percent", "bytes"], amount: float, length: int, size: int
) -> None:
    lengths = torch.tensor([length])
    less = int(Budget(amount, unit).resolve(lengths, size))
    more = int(Budget(100 if unit == "percent" else LARGEST, unit).resolve(lengths, size))
    assert 1 <= less <= more <= LARGEST


def test_an_integer_of_any_size_is_refused_by_a_sentence() -> None:
    for amount in (10**19, 10**400):
        with pytest.raises(ValueError, match="use at most 2147483647"):
            Budget(amount)


def test_resolve_keeps_dtype_and_device() -> None:
    length = torch.tensor([100, 0], dtype=torch.int32)
    for budget in (Budget(8), Budget(50, "percent"), Budget(10, "bytes")):
        assert budget.resolve(length, 20).dtype == torch.int32
    assert Budget(50, "percent").resolve(length, 20, least=3).tolist() == [50, 3]
