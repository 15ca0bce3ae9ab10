"""Backends that packages register, and what is said of those that cannot be used."""

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from kv_policy import Backend, backends, installed_backends

Install = Callable[..., None]
GOOD = Backend("good", "attends", lambda: None, devices=("cpu",))
MODULE = "registers_backends"  # what it holds: a backend, and something else


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Register names for what `module:attribute` says, and nothing else."""
    installed_backends.cache_clear()

    def be(**names: tuple[str, ...]) -> None:
        made = {
            name: tuple(EntryPoint(name, value, backends.GROUP) for value in values)
            for name, values in names.items()
        }
        monkeypatch.setattr(backends, "claims", lambda group: made)
        module = ModuleType(MODULE)
        vars(module).update(GOOD=GOOD, NOT_ONE="no backend")
        monkeypatch.setitem(sys.modules, MODULE, module)

    yield be
    installed_backends.cache_clear()


def test_a_registered_backend_is_found(register: Install) -> None:
    register(good=(f"{MODULE}:GOOD",))
    found = installed_backends()["good"]
    assert found.missing() is None
    assert found.installed
    assert found.distribution == MODULE  # of no distribution here: its module
    assert found.devices == ("cpu",)


def test_one_that_is_not_installed_names_what_to_install(register: Install) -> None:
    register()
    (found,) = installed_backends().values()
    assert (found.name, found.installed, found.distribution) == ("cpu", False, "kv-cpu")
    assert found.missing() == "the package kv-cpu is not installed"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((f"{MODULE}:GOOD", f"{MODULE}:NOT_ONE"), "2 installed packages claim the backend"),
        (("nowhere_at_all:BACKEND",), "cannot be loaded: ModuleNotFoundError"),
        ((f"{MODULE}:NOT_ONE",), "is no Backend of that name; register a kv_policy.Backend"),
        ((f"{MODULE}:GOOD",), "is no Backend of that name"),
    ],
    ids=["contested", "broken", "another thing", "another name"],
)
def test_one_that_cannot_be_used_says_why(
    register: Install, values: tuple[str, ...], said: str
) -> None:
    register(bad=values)
    found = installed_backends()
    assert said in (found["bad"].missing() or "")
    assert found["bad"].preferred  # so that a fallback to another backend names it
    assert found["bad"].supports("cpu")
    assert found["bad"].supports("cuda")
    assert list(found) == ["cpu", "bad"]  # the others work


@pytest.mark.parametrize(
    "values",
    [(f"{MODULE}:GOOD", f"{MODULE}:NOT_ONE"), ("nowhere_at_all:BACKEND",), (f"{MODULE}:NOT_ONE",)],
    ids=["contested", "broken", "another thing"],
)
def test_a_known_one_that_cannot_be_used_is_still_preferred_on_its_devices(
    register: Install, values: tuple[str, ...]
) -> None:
    register(cpu=values)
    (found,) = installed_backends().values()
    assert "the backend 'cpu'" in (found.missing() or "")
    assert (found.preferred, found.devices) == (True, ("cpu",))
    assert (found.about, found.installed) == ("cannot be loaded", True)
    assert found.distribution == values[0].partition(":")[0]


def test_the_devices_that_a_backend_supports() -> None:
    assert GOOD.supports("cpu")
    assert not GOOD.supports("cuda")
    assert Backend("any", "attends anywhere", lambda: None).supports("cuda")
