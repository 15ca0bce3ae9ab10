"""A forward pass, and the two shapes in which what belongs to a layer's table rows comes."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention import Attended
from kv_policy import Queries


@dataclass(frozen=True)
class Pass:
    """One forward pass, or a part of one: where its columns stand in their sequences."""

    position: Int[Tensor, "B L"]  # -1: padding
    total: Int[Tensor, " B"]  # tokens seen once the pass ends
    is_prefill: bool = True  # or a part of one; otherwise each sequence brings a token it generated
    is_partial_prefill: bool = False  # the prompt goes on in a later pass
    rows: tuple[int, ...] | None = None  # sequences that bring tokens; None: the host takes all

    @cached_property
    def before(self) -> Int[Tensor, " B"]:
        """Tokens that each sequence had before a pass that generates; -1: it brings none."""
        brings = (self.position >= 0).any(1)
        return (self.total - self.position.shape[1]).where(brings, -1)

    def over(self, layers: int) -> "Pass":
        """Let the sequences of so many layers be rows, one layer's after another's."""
        position, total = self.position.repeat(layers, 1), self.total.repeat(layers)
        return replace(self, position=position, total=total)


@dataclass(frozen=True)
class PassPart:
    """The sequences of a forward pass that read prompts, or those that generated a token."""

    now: Pass  # positions of the other sequences are -1
    column: Int[Tensor, "B 1"] | None = None  # where the generated tokens are; None: as they lie

    def vectors(self, x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H _ D"]:
        """Take this part's columns of keys or values."""
        if self.column is None:
            return x
        at = self.column[:, None, :, None]
        return x.gather(2, at.expand(*x.shape[:2], -1, x.shape[3]))

    def queries(self, given: Queries | None) -> Queries | None:
        """Take this part's columns of the queries."""
        if self.column is None or given is None:
            return given
        x = given.vectors
        at = self.column[:, None, None, :, None].expand(*x.shape[:3], -1, x.shape[4])
        return Queries(x.gather(3, at), self.now.position)

    def observed(self, result: Attended) -> Attended:
        """Take this part's columns of what was observed of the fresh tokens, which come last."""
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


@dataclass(frozen=True)
class Forward:
    """A forward pass as attention takes it, and its parts as they are stored.

    A sequence that had no token before reads a prompt, whatever the number of columns. One that had
    some and brings a single one generated it, whatever other sequences of the batch do: so each is
    treated as it would be alone, without padding.
    """

    whole: Pass
    parts: tuple[PassPart, ...]  # what generated comes before prompts

    @classmethod
    def of(
        cls,
        valid: Bool[Tensor, "B L"],
        seen: Int[Tensor, " B"],
        *,
        started: bool,
        prompt: bool | None,
        more: bool,
    ) -> "Forward":
        """Say who reads and who generates; the host waits unless all of one column generate.

        Args:
            valid: which columns hold a token.
            seen: tokens of each sequence before.
            started: whether every sequence has had a token.
            prompt: whether all tokens are of prompts, if the host knows.
            more: whether prompts go on in a later pass.
        """
        count = valid.long().cumsum(-1)
        position = torch.where(valid, seen[:, None] + count - 1, -1)
        brings, columns = count[:, -1], valid.shape[1]
        total = seen + brings
        if prompt is not None or (columns == 1 and started):
            whole = Pass(position, total, bool(prompt), more)
            return cls(whole, (PassPart(whole),))
        both = torch.stack((brings, seen)).tolist()
        single = [new == 1 and had > 0 for new, had in zip(*both, strict=True)]
        reading = tuple(i for i, new in enumerate(both[0]) if new and not single[i])
        generating = tuple(i for i, one in enumerate(single) if one)
        whole = Pass(position, total, bool(reading) or not generating, more)
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
            parts.append(PassPart(Pass(others, total - mine.long(), True, more, reading)))
        return cls(whole, tuple(parts))


def flat(x: Tensor) -> Tensor:
    """[B, H, ...] as one row per table row."""
    return x.flatten(0, 1)


def grid(x: Tensor, heads: int) -> Tensor:
    """One row per table row as [B, H, ...]; rows of several layers are those of more sequences."""
    return x.reshape(x.shape[0] // heads, heads, *x.shape[1:])
