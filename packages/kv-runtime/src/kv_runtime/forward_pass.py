"""A forward pass, and conversion between the two tensor layouts of a layer's heads."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention import Attended
from kv_policy import Queries


@dataclass(frozen=True)
class Pass:
    """One forward pass, or a part of one, with the positions of its columns."""

    position: Int[Tensor, "B L"]  # -1: padding
    total: Int[Tensor, " B"]  # tokens seen after the pass
    is_prefill: bool = True  # including chunks; otherwise each sequence decodes one token
    remaining: int = 0  # tokens of each prompt that later passes bring, at least
    rows: tuple[int, ...] | None = None  # sequences with new tokens; None: treated as all
    reach: Int[Tensor, "B L"] | None = None  # last position that a query sees; None: its own

    @property
    def is_partial_prefill(self) -> bool:
        """Whether the prompts continue in a later pass."""
        return self.remaining > 0

    @property
    def sees(self) -> Int[Tensor, "B L"]:
        """The position of the last token that each query sees; -1: padding."""
        return self.position if self.reach is None else self.reach

    @cached_property
    def is_full(self) -> bool:
        """Whether no column is padding; read from the device once a pass."""
        return bool((self.position >= 0).all())

    @cached_property
    def before(self) -> Int[Tensor, " B"]:
        """Tokens of each sequence before a decode pass; -1: it has no new token."""
        if self.position.shape[1] == 1:  # so many are before the token at this position
            return self.position[:, 0]
        brings = (self.position >= 0).any(1)
        return (self.total - self.position.shape[1]).where(brings, -1)

    def over(self, layers: int) -> "Pass":
        """Repeat the sequences for `layers` layers, as rows grouped by layer."""
        position = self.position.expand(layers, *self.position.shape).flatten(0, 1)
        total = self.total.expand(layers, -1).flatten()
        return replace(self, position=position, total=total)


@dataclass(frozen=True)
class PassPart:
    """The prefill sequences of a forward pass, or its decoding ones."""

    now: Pass  # positions of the other sequences are -1
    column: Int[Tensor, "B 1"] | None = None  # column of each decoded token; None: all columns

    def vectors(self, x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H _ D"]:
        """Select this part's columns of keys or values."""
        if self.column is None:
            return x
        at = self.column[:, None, :, None]
        return x.gather(2, at.expand(*x.shape[:2], -1, x.shape[3]))

    def queries(self, given: Queries | None) -> Queries | None:
        """Select this part's columns of queries."""
        if self.column is None or given is None:
            return given
        x = given.vectors
        at = self.column[:, None, None, :, None].expand(*x.shape[:3], -1, x.shape[4])
        return Queries(x.gather(3, at), self.now.position)

    def observed(self, result: Attended) -> Attended:
        """Select this part's columns of the new tokens' observations, which are the last entry."""
        if self.column is None or not result.mass:
            return result
        at = self.column[:, None, :]

        def last(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = parts[-1]
            return (*parts[:-1], x.gather(2, at.expand(*x.shape[:2], -1)))

        also = result.also
        if also:
            fresh = {name: last((x,))[0] for name, x in also[-1].items()}
            also = (*also[:-1], fresh)
        return replace(result, mass=last(result.mass), seen=last(result.seen), also=also)


def queries_of(
    query: Float[Tensor, "B H G L D"], now: Pass, scale: float, *, read: bool
) -> Queries:
    """Return the queries of a pass; read ones have a scale: q·k / sqrt(D) is the logit."""
    factor = scale * query.shape[-1] ** 0.5
    return Queries(query * factor if read and factor != 1 else query, now.position)


@dataclass(frozen=True)
class Forward:
    """A forward pass for attention, and its parts for storage.

    A sequence without earlier tokens is prefilled, with any number of columns. A sequence with
    earlier tokens and a single new one decodes, independent of the other sequences, so each is
    treated as in an unpadded batch of one.
    """

    whole: Pass
    parts: tuple[PassPart, ...]  # decode comes before prefill

    @classmethod
    def of(
        cls,
        valid: Bool[Tensor, "B L"],
        seen: Int[Tensor, " B"],
        remaining: int,
        reach: Int[Tensor, "B L"] | None,
        *,
        started: bool,
        prompt: bool | None,
    ) -> "Forward":
        """Split a pass into prefill and decode; the host waits unless one column is all decode.

        Args:
            valid: which columns hold a token.
            seen: earlier tokens of each sequence.
            remaining: tokens of each prompt that later passes bring, at least.
            reach: the last column of the pass that each query sees; None: its own.
            started: whether every sequence has had a token.
            prompt: whether all tokens belong to prompts, if the engine knows.
        """
        if valid.shape[1] == 1:
            count = valid.long()
            position = seen[:, None].masked_fill(~valid, -1)
        else:
            count = valid.long().cumsum(-1)
            position = torch.where(valid, seen[:, None] + count - 1, -1)
        far = None
        if reach is not None:
            far = torch.where(valid, seen[:, None] + count.gather(1, reach) - 1, -1)
        brings, columns = count[:, -1], valid.shape[1]
        total = seen + brings
        if prompt is not None or (columns == 1 and started):
            whole = Pass(position, total, bool(prompt), remaining, reach=far)
            return cls(whole, (PassPart(whole),))
        both = torch.stack((brings, seen)).tolist()
        single = [new == 1 and had > 0 for new, had in zip(*both, strict=True)]
        reading = tuple(i for i, new in enumerate(both[0]) if new and not single[i])
        generating = tuple(i for i, one in enumerate(single) if one)
        prefill = bool(reading) or not generating
        whole = Pass(position, total, prefill, remaining, reach=far)
        if not generating:
            return cls(whole, (PassPart(replace(whole, rows=reading)),))
        mine = torch.tensor(single, device=valid.device)
        column = valid.long().argmax(1, keepdim=True)
        one = position.gather(1, column).masked_fill(~mine[:, None], -1)
        parts = [
            PassPart(Pass(one, total, False, rows=generating), column if columns > 1 else None)
        ]
        if reading:
            others = position.masked_fill(mine[:, None], -1)
            parts.append(PassPart(Pass(others, total - mine.long(), True, remaining, reading)))
        return cls(whole, tuple(parts))


def flat(x: Tensor) -> Tensor:
    """Flatten [B, H, ...] to one row per head."""
    return x.flatten(0, 1)


def grid(x: Tensor, heads: int) -> Tensor:
    """Reshape one row per head to [B, H, ...]; rows of several layers extend B."""
    return x.reshape(x.shape[0] // heads, heads, *x.shape[1:])
