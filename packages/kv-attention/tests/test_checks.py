"""Invalid arguments raise a ValueError with a helpful message."""

import logging
from dataclasses import replace
from importlib.metadata import EntryPoint

import jaxtyping
import pytest
import torch

from kv_attention import (
    BackendChoice,
    DenseTokens,
    all_backends,
    attend,
    available,
    check_backend,
    choose_backend,
)
from kv_policy import Observe, PagedTokens, installed_backends


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    """Disable the checks of annotations, as in a user's program."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_queries_of_another_shape(case):
    c = case(1)
    with pytest.raises(ValueError, match=r"queries are torch\.int64 of shape"):
        replace(c, q=c.q.nan_to_num().long()).attend()
    with pytest.raises(ValueError, match="none of them 0"):
        replace(c, q=c.q[..., :0]).attend()


def test_positions_of_other_queries(case):
    c = case(1)
    with pytest.raises(ValueError, match=r"3 queries of 2 sequences need \(2, 3\)"):
        replace(c, position=c.position[:, :2]).attend()


def test_pages_of_other_table_rows(case):
    c = case(1)
    (p,) = c.pages
    fewer = PagedTokens(p.data, p.table[:, :1], p.length[:, :1], p.layout)
    with pytest.raises(ValueError, match=r"pages\[0\] has lengths of shape \(2, 1\)"):
        replace(c, pages=[fewer]).attend()


def test_pages_of_another_size(case):
    c = case(1)
    (p,) = c.pages
    with pytest.raises(ValueError, match="its layout has"):
        replace(c, pages=[PagedTokens(p.data[:, :-1], p.table, p.length, p.layout)]).attend()


def test_more_tokens_than_the_table_has_room_for(case):
    c = case(1, stored=20, page=4)
    (p,) = c.pages
    with pytest.raises(ValueError, match="a table row of 99 tokens; its table covers at most"):
        replace(c, pages=[PagedTokens(p.data, p.table, p.length * 0 + 99, p.layout)]).attend()


def test_a_bound_of_the_lengths_that_the_table_has_no_room_for(case):
    c = case(1, stored=20, page=4, known=True)
    with pytest.raises(ValueError, match="a table row of 999 tokens; its table covers at most"):
        replace(c, pages=[replace(c.pages[0], longest=999)]).attend()


def test_slots_without_a_token_that_nothing_tells(case):
    c = case(1)
    with pytest.raises(ValueError, match=r"pages\[0\] may have empty slots, and"):
        replace(c, pages=[replace(c.pages[0], holes=True)]).attend()


def test_keys_in_another_basis(case):
    c, other = case(1, D=5), case(1, D=6)
    with pytest.raises(ValueError, match="stores keys of 6 dimensions and queries have 5"):
        replace(c, pages=other.pages).attend()
    with pytest.raises(ValueError, match="keys of 6 dimensions and queries have 5"):
        replace(c, dense=other.dense).attend()


def test_values_of_different_dimensions(case):
    c, other = case(1, Dv=5), case(1, Dv=6)
    with pytest.raises(ValueError, match="values of the parts have 5, 6 dimensions"):
        replace(c, dense=other.dense).attend()


def test_dense_tokens_that_do_not_fit(case):
    c = case(1)
    (d,) = c.dense
    with pytest.raises(ValueError, match=r"dense\[0\] has keys of shape"):
        replace(c, dense=[DenseTokens(d.key[:, :1], d.value[:, :1], d.position)]).attend()
    with pytest.raises(ValueError, match="3 tokens of 2 sequences need"):
        replace(c, dense=[DenseTokens(d.key, d.value, d.position[:, :2])]).attend()


def test_positions_of_stored_tokens_are_needed_for_skipping(case):
    c = case(1)
    with pytest.raises(
        ValueError, match=r"skip=2 and gumbel=None needs the positions .* give page_positions\[0\]"
    ):
        attend(c.q, c.position, c.pages, c.dense, 1.0, Observe(None, skip=2))
    attend(c.q, c.position, c.pages, c.dense, 1.0, Observe(0, skip=2))  # no tokens to skip
    with pytest.raises(ValueError, match="0 entries for 1 tiers"):
        replace(c, page_positions=[]).attend()
    with pytest.raises(ValueError, match=r"page_positions\[0\] is of shape"):
        replace(c, page_positions=[c.page_positions[0][..., :1]]).attend()


def test_backends_by_name(case):
    found = available()
    assert list(found) == ["reference", "torch", "triton", "cpu"]
    assert found["reference"] is found["torch"] is None
    wanted = "unknown backend 'fast'; choose one of reference, torch, triton, cpu"
    with pytest.raises(ValueError, match=wanted):
        case(1).attend(backend="fast")
    broken = replace(all_backends()["torch"], missing=lambda: "it was not built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kv_attention.backends.all_backends", lambda: {"torch": broken})
        with pytest.raises(ValueError, match="'torch' cannot be used here: it was not built"):
            case(1).attend()
    assert torch.isfinite(case(1).attend().out).all()


@pytest.mark.usefixtures("registered")
def test_a_backend_that_is_not_installed_says_so(case):
    assert available()["cpu"] == "the package kv-cpu is not installed"
    with pytest.raises(ValueError, match="'cpu' cannot be used here: the package"):
        case(1, L=1).attend(backend="cpu")


@pytest.fixture
def registered(monkeypatch):
    """Return the entry points of backends by name, none at first, for a test to add some."""
    caches, found = (installed_backends, all_backends), {}
    for each in caches:
        each.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("kv_policy.backends.claims", lambda group: found)
        yield found
    for each in caches:
        each.cache_clear()


def entry(name):
    """Return an entry point of a module that does not exist."""
    return EntryPoint(name, "nowhere_at_all:BACKEND", "kv_policy.backends")


def test_a_registered_backend_that_cannot_be_loaded_is_passed_over_with_a_reason(registered):
    registered |= {name: (entry(name),) for name in ("cpu", "other")}
    choice = choose_backend("cpu")
    assert choice.name == "torch"
    assert list(choice.passed_over) == ["cpu", "other"]
    for name, reason in choice.passed_over.items():
        assert f"the backend '{name}' of nowhere_at_all cannot be loaded" in reason
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setattr("torch.cuda.is_available", lambda: False)
        assert list(choose_backend("cuda").passed_over) == ["triton", "other"]


@pytest.mark.parametrize("name", ["reference", "torch", "triton"])
def test_a_registration_by_the_name_of_a_built_in_backend_is_ignored(registered, caplog, name):
    with caplog.at_level(logging.WARNING, logger="kv_attention"):
        own = all_backends()[name]
    assert not caplog.records
    installed_backends.cache_clear()
    all_backends.cache_clear()
    registered[name] = (entry(name),)
    with caplog.at_level(logging.WARNING, logger="kv_attention"):
        found = all_backends()
    (said,) = caplog.records
    assert said.name == "kv_attention"
    assert f"the backend '{name}' that nowhere_at_all registers is ignored" in said.getMessage()
    assert (found[name].about, found[name].preferred) == (own.about, own.preferred)
    assert choose_backend("cpu").passed_over.keys() == {"cpu"}


def test_a_preferred_backend_of_all_devices_is_chosen():
    every = replace(all_backends()["torch"], name="every", preferred=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kv_attention.backends.all_backends", lambda: {"every": every})
        assert choose_backend("cuda") == BackendChoice("every", {})
        check_backend("every", "cuda")


def with_native(patch, reason):
    """Register a native backend that is available, or unavailable for a reason."""
    found = all_backends()
    native = replace(found["cpu"], missing=lambda: reason, load=found["torch"].load)
    patch.setattr("kv_attention.backends.all_backends", lambda: {**found, "cpu": native})


def with_triton(patch, reason):
    """Let Triton kernels be available, or unavailable for a reason."""
    found = all_backends()
    triton = replace(found["triton"], missing=lambda: reason)
    patch.setattr("kv_attention.backends.all_backends", lambda: {**found, "triton": triton})


@pytest.mark.parametrize(("capability", "works"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_kernels_need_a_gpu_of_a_certain_age(monkeypatch, capability, works):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    ages = [(6, 1), capability]  # an older one beside it does not matter
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda i: ages[i])
    assert all_backends()["triton"].missing() is None  # nobody has used a GPU, nor does this
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    said = all_backends()["triton"].missing()
    wanted = "GPUs have at most compute capability 7.5; kernels need 8.0"
    assert said == (None if works else wanted)


def test_the_fastest_backend_for_a_device_is_chosen():
    with pytest.MonkeyPatch.context() as patch:
        with_native(patch, None)
        assert choose_backend("cpu") == BackendChoice("cpu", {})
        for reason, name in (("too old", "torch"), (None, "triton")):
            with_triton(patch, reason)
            assert choose_backend(torch.device("cuda", 1)).name == name
        with_native(patch, "it was not built")
        assert choose_backend("cpu") == BackendChoice("torch", {"cpu": "it was not built"})
        assert choose_backend("meta") == BackendChoice("torch", {})


def test_a_backend_that_cannot_serve_a_device_is_refused():
    check_backend("torch", "cpu")
    check_backend("torch", "cuda")
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        check_backend("fast", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        with_native(patch, None)
        check_backend("cpu", "cpu")
        with pytest.raises(ValueError, match="'cpu' supports tensors on cpu; these are on"):
            check_backend("cpu", "cuda:0")
        with_native(patch, "it was not built")
        with pytest.raises(ValueError, match="'cpu' cannot be used here: it was not built"):
            check_backend("cpu", "cpu")
