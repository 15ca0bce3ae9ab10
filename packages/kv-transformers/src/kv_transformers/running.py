"""The current thread's forward pass over one of our caches, and its state."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from kv_transformers.latents import expect_equal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kv_transformers.latents import Absorbed, Latents
    from kv_transformers.pass_columns import PassColumns
    from kv_transformers.softmax import Softmax


@runtime_checkable
class Attends(Protocol):
    """A cache that computes attention itself; see `fresh_layer.AttendingCache`."""

    def attend(
        self,
        layer: int,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        softmax: "Softmax",
        columns: "PassColumns",
    ) -> "Tensor":
        """Attend over the stored and the new tokens, then store the new ones."""
        ...

    @property
    def columns(self) -> int:
        """Number of columns seen, including padding and evicted tokens; 0 if none are stored."""
        ...

    @property
    def shares(self) -> bool:
        """Whether layers of the model read keys and values of others."""
        ...

    @property
    def indexes(self) -> bool:
        """Whether layers that it attends for select tokens, for which they read whole masks."""
        ...

    def selects(self, layer: int) -> bool:
        """Whether a layer, of those that it attends for, selects tokens for each query."""
        ...

    def attend_latents(
        self, layer: int, given: "Absorbed", softmax: "Softmax", columns: "PassColumns"
    ) -> "Tensor":
        """Attend over the stored and the new latents, then store the new ones."""
        ...

    def attends(self, layer: int | None) -> bool:
        """Whether the cache computes the attention of a layer of the model."""
        ...

    def expect_mask(self, mask: "Tensor | None", fresh: int) -> None:
        """Raise if a 2D mask differs from the stored columns."""
        ...

    def expect_next(self, position: "Tensor", valid: "Tensor | None") -> None:
        """Raise if tokens do not follow the stored ones."""
        ...

    def expect_ids(self, ids: "Tensor | None") -> None:
        """Raise if a call without token ids is not supported."""
        ...

    def end(self, ids: "Tensor | None") -> None:
        """Complete a pass over these token ids, after the model's own computation."""
        ...


@dataclass
class Running:
    """A forward pass over a cache, from the call of the outermost module that received it."""

    cache: Attends
    handed: int | None = None  # layer whose new keys were returned but not attended to yet
    used: bool = False  # the model has called the cache
    ids: "Tensor | None" = None  # the token ids of the pass, if the model was given them
    latents: "Latents | None" = None  # what the layer `handed` was given, if it caches latents
    differs: "dict[int, Tensor]" = field(default_factory=dict)  # by layer; see `latents.Absorbed`
    given: "Tensor | None" = None  # the 2D mask of the call, if layers select tokens
    mask: "Tensor | None" = None  # the mask of layers that select tokens, if the model asked for it
    selected: "Tensor | None" = None  # what an indexer gave last, if its layer hands on no indices

    def hand(self, layer: int) -> None:
        """Record that a layer's new keys were returned to the model.

        Raises:
            RuntimeError: those of another layer were never attended to.
        """
        self.expect_attended()
        self.handed, self.used = layer, True

    def skip(self) -> None:
        """Record that a layer with a cache of transformers was updated.

        Raises:
            RuntimeError: new keys of another layer were never attended to.
        """
        self.expect_attended()
        self.used = True

    def attended(self) -> bool:
        """Record that the new keys reached the attention function; whether for the first time."""
        first, self.handed, self.latents = self.handed is not None, None, None
        return first

    def latents_of(self, layer: object) -> "Latents | None":
        """Return the new latents of a layer, if these were returned to the model last."""
        return self.latents if layer == self.handed else None

    def expect_done(self) -> None:
        """Raise if a finished pass did not use its cache properly.

        Raises:
            RuntimeError: the model did not call the cache, or did not attend to the new keys.
        """
        self.expect_attended()
        expect_equal(self.differs)
        if not self.used:
            raise RuntimeError(
                "the model was given a compressed cache but did not use it; discard the output of "
                "this pass, and call the model without the cache"
            )

    def expect_attended(self) -> None:
        """Raise if new keys never reached the attention function.

        Raises:
            RuntimeError: the model changed them, or uses its own attention code.
        """
        if self.handed is not None:
            raise RuntimeError(
                f"nothing attended to the fresh keys of layer {self.handed} over the compressed "
                "cache: the model changes keys between cache.update and attention, or does not "
                "call its attention function, so a compressed cache cannot support it; discard the "
                "output of this pass, and use a cache of transformers"
            )


@runtime_checkable
class Counts(Protocol):
    """An object that is notified when a module's call with a cache has ended."""

    def ended(self) -> None:
        """Decrement the number of running calls."""
        ...


@dataclass(frozen=True)
class CallFrame:
    """A module's running forward call; calls with the same cache share one pass."""

    module: "nn.Module"
    owner: Counts
    running: Running | None  # None: the call has no cache of ours
    outer: "CallFrame | None" = field(repr=False, default=None)

    @property
    def outermost(self) -> bool:
        """Whether no module around this one runs the same pass."""
        return self.outer is None or self.outer.running is not self.running


# Per thread, as threads may run one model concurrently; None outside of forward calls.
_FRAME: Final[ContextVar[CallFrame | None]] = ContextVar("kv_transformers_frame", default=None)


def current() -> Running | None:
    """Return this thread's running pass over one of our caches."""
    frame = _FRAME.get()
    return None if frame is None else frame.running


def enter(
    module: "nn.Module",
    owner: Counts,
    cache: Attends | None,
    ids: "Tensor | None" = None,
    mask: "Tensor | None" = None,
) -> None:
    """Record the start of a module's forward call, with or without a cache of ours.

    Args:
        module: the module.
        owner: is notified when the call has ended.
        cache: the cache.
        ids: the token ids of the call, if it has any.
        mask: the 2D mask of the call, for a cache of layers that select tokens.
    """
    _forget(module)
    outer = _FRAME.get()
    running = None if outer is None else outer.running
    if cache is None:
        running = None
    elif running is None or running.cache is not cache:
        running = Running(cache, ids=ids, given=mask)
    _FRAME.set(CallFrame(module, owner, running, outer))


def leave(module: "nn.Module") -> CallFrame | None:
    """Record the end of a module's forward call; return None if its start raised."""
    frame = _FRAME.get()
    if frame is None or frame.module is not module:
        return None
    _FRAME.set(frame.outer)
    return frame


@contextmanager
def unwinding() -> Iterator[None]:
    """End the calls that an interrupt leaves running inside a `with` block."""
    before = _FRAME.get()
    try:
        yield
    finally:
        frame = _FRAME.get()
        while frame is not None and frame is not before:
            if frame.running is not None:
                frame.owner.ended()
            frame = frame.outer
        _FRAME.set(before)


def _forget(module: "nn.Module") -> None:
    """End calls left over from an interrupt, as no module is called within its own call."""
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
