"""The forward pass over one of our caches that the current thread runs, and what it still owes."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn


@runtime_checkable
class Attends(Protocol):
    """A cache that attends itself; `fresh_layer.AttendingCache` says what its methods do."""

    def attend(
        self,
        layer: int,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        scale: float,
        valid: "Tensor | None",
    ) -> "Tensor":
        """Attend over everything held and the fresh tokens, then store those."""
        ...

    def expect_mask(self, mask: "Tensor | None", fresh: int) -> None:
        """Refuse a 2D mask that differs from what the cache holds."""
        ...

    def expect_next(self, position: "Tensor", valid: "Tensor | None") -> None:
        """Refuse tokens that do not come after those that are held."""
        ...


@dataclass
class Running:
    """A forward pass over a cache, from the outermost module that was given it to its end."""

    cache: Attends
    handed: int | None = None  # layer whose fresh keys were handed on and are not attended to yet
    used: bool = False  # the model has brought keys

    def hand(self, layer: int) -> None:
        """Note that a layer's fresh keys go to attention.

        Raises:
            RuntimeError: those of another layer never got there.
        """
        self.expect_attended()
        self.handed, self.used = layer, True

    def attended(self) -> None:
        """Note that the fresh keys came to attention."""
        self.handed = None

    def expect_done(self) -> None:
        """Raise if a pass has ended that did not use its cache, or not as it has to.

        Raises:
            RuntimeError: the model brought no keys, or nothing attended to them.
        """
        self.expect_attended()
        if not self.used:
            raise RuntimeError(
                "the model was given a compressed cache and did not use it; discard what this pass "
                "returned, and leave the cache out"
            )

    def expect_attended(self) -> None:
        """Raise if fresh keys that were handed on never came to attention.

        Raises:
            RuntimeError: the model changed them, or attends by code of its own.
        """
        if self.handed is not None:
            raise RuntimeError(
                f"nothing attended to the fresh keys of layer {self.handed} over the compressed "
                "cache: the model changes keys between cache.update and attention, or does not "
                "call its attention function, so a compressed cache cannot serve it; discard what "
                "this pass returned, and use a cache of transformers"
            )


@runtime_checkable
class Counts(Protocol):
    """Who has to know when a module's call over a cache has ended."""

    def ended(self) -> None:
        """Count one call less."""
        ...


@dataclass(frozen=True)
class CallFrame:
    """A module within its forward call; those that were given one cache share its pass."""

    module: "nn.Module"
    owner: Counts
    running: Running | None  # None: this module was given no cache of ours
    outer: "CallFrame | None" = field(repr=False, default=None)

    @property
    def outermost(self) -> bool:
        """Whether no module around this one runs the same pass."""
        return self.outer is None or self.outer.running is not self.running


# Per thread, as threads may run one model at the same time; None outside of forward calls.
_FRAME: Final[ContextVar[CallFrame | None]] = ContextVar("kv_transformers_frame", default=None)


def current() -> Running | None:
    """The pass over one of our caches that this thread runs."""
    frame = _FRAME.get()
    return None if frame is None else frame.running


def enter(module: "nn.Module", owner: Counts, cache: Attends | None) -> None:
    """Note that a module's forward call begins, with a cache of ours or without."""
    _forget(module)
    outer = _FRAME.get()
    running = None if outer is None else outer.running
    if cache is None:
        running = None
    elif running is None or running.cache is not cache:
        running = Running(cache)
    _FRAME.set(CallFrame(module, owner, running, outer))


def leave(module: "nn.Module") -> CallFrame | None:
    """Note that a module's forward call ends; None if it never began, as it was refused."""
    frame = _FRAME.get()
    if frame is None or frame.module is not module:
        return None
    _FRAME.set(frame.outer)
    return frame


def _forget(module: "nn.Module") -> None:
    """End calls that an interrupt left behind: no module is called within its own call."""
    left, frame = [], _FRAME.get()
    while frame is not None:
        left.append(frame)
        if frame.module is module:
            _FRAME.set(frame.outer)
            for each in left:
                if each.running is not None:
                    each.owner.ended()
            return
        frame = frame.outer
