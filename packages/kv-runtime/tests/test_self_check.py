"""A backend is compared with torch before a cache chooses it by itself."""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import ModuleType

import pytest
import torch

from kv_attention import all_backends
from kv_paging import torch_kernels
from kv_policy import Backend, KVPolicy, PagedTokens, parse
from kv_runtime import SelfCheck, backends
from kv_runtime.cache import PolicyCache
from tiered_policies import POLICIES, SHAPE

Register = Callable[..., None]
WIDE = replace(SHAPE, key_dim=16, value_dim=16)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """Let a backend `made` be preferred on a CPU, whose results are those of torch, changed."""
    torch_backend = all_backends()["torch"]
    monkeypatch.setattr("kv_runtime.backends.failure", SelfCheck.run)
    backends._say.cache_clear()

    def register(change: Callable[[object], object], page_kernels: str | None = None) -> None:
        backend = Backend(
            "made",
            "torch, changed",
            lambda: lambda inputs: change(torch_backend.load()(inputs)),
            preferred=True,
            self_checked=True,
            page_kernels=page_kernels,
        )
        every = {**all_backends(), "made": backend}
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
def test_a_backend_that_is_right_is_chosen(made: Register, name: str) -> None:
    made(scaled(1 + 1e-4))
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
    made: Register,
    caplog: pytest.LogCaptureFixture,
    policy: KVPolicy,
    change: Callable[[object], object],
    said: str,
) -> None:
    made(change)
    for _ in range(2):
        assert PolicyCache(policy, SHAPE).backend == "torch"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kv_runtime", logging.WARNING)
    assert f"it fails its self-check under {policy}: {said}" in record.getMessage()


@pytest.mark.parametrize("text", ["kvzip:budget=24+k8v4", "leankv", "kv-compress:keep=25%+k4v4"])
def test_policies_of_every_kind_are_checked(made: Register, text: str) -> None:
    made(scaled(1.0))
    assert PolicyCache(parse(text), WIDE, replays=True).backend == "made"


def test_latents_whose_values_are_in_keys_are_checked(made: Register) -> None:
    made(scaled(1.0))
    assert PolicyCache(parse("k8v4"), replace(WIDE, value_in_key=True)).backend == "made"


def test_one_that_is_named_is_taken_at_its_word(made: Register) -> None:
    made(scaled(2.0))
    assert PolicyCache(parse("k8v4"), SHAPE, backend="made").backend == "made"


def test_one_that_needs_no_self_check_gets_none(made: Register) -> None:
    made(scaled(2.0))
    found = backends.all_backends()["made"]
    with pytest.MonkeyPatch.context() as patch:
        every = {"made": replace(found, self_checked=False)}
        for module in ("kv_attention.backends", "kv_runtime.backends"):
            patch.setattr(f"{module}.all_backends", lambda: every)
        assert PolicyCache(parse("k8v4"), SHAPE).backend == "made"


def test_the_same_use_is_checked_once(made: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[SelfCheck] = []
    count = cache(lambda check: checks.append(check))
    monkeypatch.setattr("kv_runtime.backends.failure", count)
    made(scaled(1.0))
    other = replace(SHAPE, dtype=torch.bfloat16)
    for policy, shape in (("k8v4", SHAPE), ("k8v4", SHAPE), ("k4v4", SHAPE), ("k8v4", other)):
        PolicyCache(parse(policy), shape)
    assert [str(each.policy) for each in checks] == ["k8v4", "k4v4", "k8v4"]


def test_a_wrong_bit_in_the_pages_is_found(made: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ModuleType("wrong_kernels")
    vars(kernels).update(vars(torch_kernels))
    kernels.missing, kernels.declined = lambda: None, lambda *given: None

    def write(pages: PagedTokens, tokens: object) -> None:
        torch_kernels.write(pages, tokens)
        pages.data[:, 0] ^= 0x40

    kernels.write = write
    monkeypatch.setitem(sys.modules, "wrong_kernels", kernels)
    made(scaled(1.0), page_kernels="wrong_kernels")
    assert PolicyCache(parse("streaming:budget=12,sinks=2+k8v4"), SHAPE).backend == "torch"


def test_what_an_engine_changes_while_it_loads_a_model_does_not_matter(made: Register) -> None:
    made(scaled(1.0))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = backends.checked_backend(
                torch.device("cpu"), "auto", parse("leankv"), WIDE, 16, PolicyCache
            )
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == "made"
