"""A backend is compared with torch before a cache chooses it by itself."""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kv_attention import all_backends
from kv_paging import torch_kernels
from kv_policy import Backend, KVPolicy, PagedTokens, parse
from kv_runtime import backends, self_check
from kv_runtime.cache import PolicyCache
from tiered_policies import POLICIES, SHAPE

Register = Callable[..., None]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """Let a backend `made` be preferred on a CPU, whose results are those of torch, changed."""
    torch_backend = all_backends()["torch"]
    monkeypatch.setattr("kv_runtime.self_check.failure", self_check.failure.__wrapped__)
    monkeypatch.setattr("kv_runtime.backends.failure", self_check.failure.__wrapped__)
    backends._say.cache_clear()

    def register(change: Callable[[object], object], page_kernels: str | None = None) -> None:
        made = Backend(
            "made",
            "torch, changed",
            lambda: lambda inputs: change(torch_backend.load()(inputs)),
            preferred=True,
            tried=True,
            page_kernels=page_kernels,
        )
        every = {**all_backends(), "made": made}
        del every["cpu"]
        for module in ("kv_attention.backends", "kv_runtime.backends"):
            monkeypatch.setattr(f"{module}.all_backends", lambda: every)
        monkeypatch.setattr("kv_paging.kernels.installed_backends", lambda: every)

    yield register
    backends._say.cache_clear()


def scaled(factor: float) -> Callable[[object], object]:
    """Multiply what attention returns."""
    return lambda found: replace(found, out=found.out * factor)


@pytest.mark.parametrize("name", ["streaming-window", *[n for n in POLICIES if "basis" in n][:2]])
def test_a_backend_that_is_right_is_chosen(tried: Register, name: str) -> None:
    tried(scaled(1 + 1e-4))
    assert PolicyCache(POLICIES[name], SHAPE).backend == "made"


@pytest.mark.parametrize("policy", [parse("k8v4"), POLICIES["streaming-window"]], ids=str)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scaled(1.1), "its results differ from those of torch by 10%"),
        (scaled(torch.nan), "its results differ from those of torch by inf%"),
        (lambda found: found.nothing, "AttributeError: 'Attended' object has no attribute"),
    ],
    ids=["wrong", "NaN", "raises"],
)
def test_one_that_is_wrong_is_passed_over_and_the_reason_said(
    tried: Register,
    caplog: pytest.LogCaptureFixture,
    policy: KVPolicy,
    change: Callable[[object], object],
    said: str,
) -> None:
    tried(change)
    for _ in range(2):
        assert PolicyCache(policy, SHAPE).backend == "torch"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kv_runtime", logging.WARNING)
    assert f"it fails a trial under {policy}: {said}" in record.getMessage()


@pytest.mark.parametrize("text", ["kvzip:budget=24+k8v4", "leankv", "kv-compress:keep=25%+k4v4"])
def test_policies_of_every_kind_are_tried(tried: Register, text: str) -> None:
    tried(scaled(1.0))
    shape = replace(SHAPE, key_dim=16, value_dim=16)
    assert PolicyCache(parse(text), shape, replays=True).backend == "made"


def test_one_that_is_named_is_taken_at_its_word(tried: Register) -> None:
    tried(scaled(2.0))
    assert PolicyCache(parse("k8v4"), SHAPE, backend="made").backend == "made"


def test_one_that_needs_no_trial_gets_none(tried: Register) -> None:
    tried(scaled(2.0))
    found = backends.all_backends()["made"]
    with pytest.MonkeyPatch.context() as patch:
        every = {"made": replace(found, tried=False)}
        for module in ("kv_attention.backends", "kv_runtime.backends"):
            patch.setattr(f"{module}.all_backends", lambda: every)
        assert PolicyCache(parse("k8v4"), SHAPE).backend == "made"


def test_the_same_use_is_tried_once(tried: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[self_check.Trial] = []
    count = self_check.cache(lambda trial: trials.append(trial))
    monkeypatch.setattr("kv_runtime.backends.failure", count)
    tried(scaled(1.0))
    other = replace(SHAPE, dtype=torch.bfloat16)
    for policy, shape in (("k8v4", SHAPE), ("k8v4", SHAPE), ("k4v4", SHAPE), ("k8v4", other)):
        PolicyCache(parse(policy), shape)
    assert [str(each.policy) for each in trials] == ["k8v4", "k4v4", "k8v4"]


def test_a_wrong_bit_in_the_pages_is_found(
    tried: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = ModuleType("wrong_kernels")
    vars(kernels).update(vars(torch_kernels))
    kernels.missing, kernels.declined = lambda: None, lambda *given: None

    def write(pages: PagedTokens, tokens: object) -> None:
        torch_kernels.write(pages, tokens)
        pages.data[:, 0] ^= 0x40

    kernels.write = write
    monkeypatch.setitem(sys.modules, "wrong_kernels", kernels)
    tried(scaled(1.0), page_kernels="wrong_kernels")
    assert PolicyCache(parse("streaming:budget=12,sinks=2+k8v4"), SHAPE).backend == "torch"
