"""Which backend serves, that a fallback is said once, and that an explicit name is kept to."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from kv_attention import all_backends
from kv_paging import torch_kernels
from kv_policy import Instructions, compose, parse
from kv_policy.installing import checkout_of, install_command
from kv_runtime import backends
from kv_runtime.backends import COMPILED, Serving, backend_for, serving
from kv_runtime.cache import PolicyCache
from native import need
from tiered_policies import SHAPE, Exact, Turned
from tiered_world import World, ragged

RAGGED = Turned("6253", "154")  # each head of each layer has ranks of its own
ABSENT = "the package kv-cpu is not installed"
Native = Callable[[str | None], None]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Native]:
    """Let the native backend be there, or not, for a reason."""
    backends._say.cache_clear()

    real = all_backends()

    def be(reason: str | None) -> None:
        found = Instructions(("plain", "avx2"), ("plain", "avx2"), "avx2", None)
        cpu = replace(real["cpu"], missing=lambda: reason, instructions=lambda: found)
        cpu = replace(cpu, load=real["torch"].load, installed=reason != ABSENT)
        changed = {**real, "cpu": cpu}
        monkeypatch.setattr("kv_attention.backends.all_backends", lambda: changed)
        monkeypatch.setattr("kv_runtime.backends.all_backends", lambda: changed)

    yield be
    backends._say.cache_clear()


def test_a_cpu_is_served_natively_where_it_can_be(
    native: Native, caplog: pytest.LogCaptureFixture
) -> None:
    native(None)
    assert backend_for("cpu") == "cpu"
    assert str(serving("cpu")) == "cpu avx2"
    assert serving("cpu", "torch") == Serving("torch")
    assert PolicyCache(parse("k8v4"), SHAPE).backend == "cpu"
    assert PolicyCache(parse("k8v4"), SHAPE, backend="torch").backend == "torch"
    assert not caplog.records


def test_a_gpu_is_served_by_triton_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for reason, name in (("too old", "torch"), (None, "triton")):
        every = {**all_backends()}
        every["triton"] = replace(every["triton"], missing=lambda reason=reason: reason)
        for module in ("kv_attention.backends", "kv_runtime.backends"):
            monkeypatch.setattr(f"{module}.all_backends", lambda every=every: every)
        assert backend_for("cuda") == name
    assert ["too old" in each for each in caplog.messages] == [True]


def test_falling_back_is_said_once_for_a_reason(
    native: Native, caplog: pytest.LogCaptureFixture
) -> None:
    native("its library does not load: libtorch_cpu.so")
    for _ in range(3):
        assert PolicyCache(parse("k8v4"), SHAPE).backend == "torch"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kv_runtime", logging.WARNING)
    assert "'cpu' is preferred but unavailable: its library does not load: libtorch" in (
        record.getMessage()
    )
    native("another reason")
    backend_for("cpu")
    assert "another reason" in caplog.records[1].getMessage()


def test_what_to_do_is_said(native: Native, caplog: pytest.LogCaptureFixture) -> None:
    native(ABSENT)
    backend_for("cpu")
    wanted = f"{ABSENT} (`{install_command('kv-cpu')}`"
    assert wanted in caplog.messages[0]
    if checkout_of("kv-cpu") is not None:  # and not from wheels
        assert caplog.messages[0].endswith(f"`{COMPILED})")
    native("its library was not built")
    backend_for("cpu")
    assert caplog.messages[1].endswith("was not built (run `kv-serve doctor` for details)")


def test_an_explicit_name_is_refused_at_construction(
    native: Native, caplog: pytest.LogCaptureFixture
) -> None:
    native("it was not built")
    with pytest.raises(ValueError, match="backend 'cpu' cannot be used here: it was not built"):
        PolicyCache(parse("k8v4"), SHAPE, backend="cpu")
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        PolicyCache(parse("k8v4"), SHAPE, backend="fast")
    native(None)
    with pytest.raises(ValueError, match="'cpu' supports tensors on cpu; these are on meta"):
        PolicyCache(parse("k8v4"), SHAPE, device="meta", backend="cpu")
    assert not caplog.records


@pytest.mark.parametrize(
    "policy",
    [
        "snapkv:budget=20,window=8",
        compose(Exact(1), RAGGED),
        compose(parse("streaming:budget=20,sinks=2"), Exact(1, window=3), RAGGED),
    ],
    ids=str,
)
def test_native_attention_gives_what_torch_gives(policy: object) -> None:
    need("cpu")
    policy = parse(policy) if isinstance(policy, str) else policy
    world = World(policy, backend="cpu")  # which compares each pass with attention in torch
    world.forward(ragged(11, 17))
    world.go_on(9)
    assert torch.equal(world.seen, torch.tensor([20, 26]))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_backend_says_who_writes_the_pages_too(backend: str) -> None:
    need(backend)
    world = World(parse("k8v4"), backend=backend)
    world.forward(ragged(5, 7))
    (store,) = world.cache.batch.tiers.stores
    assert (store.kernels is torch_kernels) == (backend == "torch")
