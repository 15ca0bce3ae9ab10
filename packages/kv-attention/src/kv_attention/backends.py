"""The implementations of attention, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import reference, torch_backend
from kv_attention.tokens import Attended, DenseTokens
from kv_policy import Observe, PagedTokens


@runtime_checkable
class Attend(Protocol):
    """What a backend does; `kv_attention.attend` has checked the arguments."""

    def __call__(
        self,
        q: Float[Tensor, "B H G L D"],
        position: Int[Tensor, "B L"],
        pages: Sequence[PagedTokens],
        dense: Sequence[DenseTokens],
        value_dim: int,
        scale: float,
        observe: Observe,
        page_positions: Sequence[Int[Tensor, "B H _"] | None],
        others: Sequence[Observe],
    ) -> Attended:
        """Attend to all parts."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation, and why it cannot be used on this machine, if so."""

    name: str
    about: str
    load: Callable[[], Attend]
    missing: Callable[[], str | None] = lambda: None


NATIVE: Final = "kv_cpu"  # a package of its own: it is built, and need not be there


def _native() -> Any:
    # By name, as arrows point the other way: that package is written against this one.
    return import_module(NATIVE)


def _native_missing() -> str | None:
    if find_spec(NATIVE) is None:
        return "the package kv-cpu is not installed"
    reason: str | None = _native().missing()
    return reason


BACKENDS: Final[Mapping[str, Backend]] = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            Backend("reference", "float64, slow: the judge", lambda: reference.attend),
            Backend("torch", "plain torch in blocks, any device", lambda: torch_backend.attend),
            Backend(
                "cpu",
                "native code for decode steps on a CPU, torch for what it does not do",
                lambda: _native().attend,
                _native_missing,
            ),
        )
    }
)


def available() -> dict[str, str | None]:
    """Say of every backend why it cannot be used on this machine; None if it can."""
    return {name: backend.missing() for name, backend in BACKENDS.items()}


def load(name: str) -> Attend:
    """Give the implementation of that name.

    Raises:
        ValueError: there is none, or it cannot be used on this machine.
    """
    if name not in BACKENDS:
        raise ValueError(f"no backend is called {name!r}; there are {', '.join(BACKENDS)}")
    reason = BACKENDS[name].missing()
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot be used here: {reason}")
    return BACKENDS[name].load()
