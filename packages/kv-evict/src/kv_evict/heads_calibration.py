"""Calibration of head scores: attention to repeated tokens, and the need for distant ones."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_evict.calibrating import expect_no_padding
from kv_evict.heads_file import Facts, HeadScores, Kind, save
from kv_policy import CacheShape, Calibrated

SINKS: Final = 4  # first tokens that a head with both ends sees
_QUERIES: Final = 256  # queries whose attention is computed at once
_SHARES: Final[tuple[Kind, ...]] = ("induction", "echo")  # of attention, per query head


class HeadsCalibration:
    """Scores the KV heads of a model on random tokens that repeat with a period.

    Queries from the second period on are counted. With t the token of a query, the induction score
    is the mean attention to the tokens after earlier occurrences of t, the echo score that to the
    occurrences themselves (RazorAttention); a KV head has the maximum over its query heads. The
    loss is the squared error of the head's outputs when it sees only the first tokens and the
    newest half of a period, over the squared outputs of its layer: a head that retrieves the
    previous period, which is further away, loses it. Memory does not grow with the tokens.
    """

    def __init__(self, shape: CacheShape, period: int) -> None:
        """Start with no tokens.

        Args:
            shape: the model's cache.
            period: tokens after which a pass repeats; before the first, it may have fewer others.

        Raises:
            ValueError: the period is so short that the previous one is among the first tokens.
        """
        if period < 4 * SINKS:
            raise ValueError(f"a period of {period} tokens was given; use at least {4 * SINKS}")
        self.shape, self.period, self.recent = shape, period, period // 2
        lead = (shape.layers, shape.kv_heads)
        self._state: dict[str, Tensor] = {
            "induction": torch.zeros(*lead, shape.group, dtype=torch.float64),
            "echo": torch.zeros(*lead, shape.group, dtype=torch.float64),
            "error": torch.zeros(lead, dtype=torch.float64),
            "output": torch.zeros(lead, dtype=torch.float64),
            "queries": torch.zeros(shape.layers, dtype=torch.int64),
            "tokens": torch.zeros(shape.layers, dtype=torch.int64),
        }

    @property
    def tokens(self) -> int:
        """Tokens accumulated in every layer."""
        return int(self._state["tokens"].min())

    def see(
        self,
        layer: int,
        query: Float[Tensor, "B H G L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        there: Bool[Tensor, "B L"] | None = None,
    ) -> None:
        """Accumulate a layer's vectors of a pass, after RoPE.

        Raises:
            ValueError: there is padding, the pass is shorter than two periods, or vectors contain
                an infinity or NaN.
        """
        expect_no_padding(layer, there)
        length = key.shape[2]
        if length < 2 * self.period:
            raise ValueError(
                f"layer {layer}: a pass has {length} tokens, less than two periods of {self.period}"
            )
        state, start = self._state, length % self.period
        for seen, weight, lazy in self._attention(query.float(), key.float(), start):
            v = value.float()[:, :, None, : weight.shape[-1]]
            output = weight @ v
            error = (lazy @ v - output).double().square().sum((0, 2, 3, 4))
            for kind, found in zip(_SHARES, self._repeated(seen, start), strict=True):
                state[kind][layer] += (weight * found).double().sum((0, 3, 4)).cpu()
            state["error"][layer] += error.cpu()
            state["output"][layer] += output.double().square().sum((0, 2, 3, 4)).cpu()
            state["queries"][layer] += len(key) * len(seen)
        state["tokens"][layer] += len(key) * length
        if not state["output"][layer].isfinite().all():
            raise ValueError(f"layer {layer}: keys or values contain an infinity or NaN")

    def _attention(
        self, query: Float[Tensor, "B H G L D"], key: Float[Tensor, "B H L D"], start: int
    ) -> Iterator[tuple[Int[Tensor, " Q"], Float[Tensor, "B H G Q T"], Float[Tensor, "B H G Q T"]]]:
        """Yield places of counted queries, their attention, and that with both ends alone."""
        length, scale = key.shape[2], key.shape[-1] ** -0.5
        place = torch.arange(length, device=key.device)
        for first in range(start + self.period, length, _QUERIES):
            some = slice(first, min(length, first + _QUERIES))
            logit = query[:, :, :, some] @ key[:, :, None, : some.stop].mT * scale
            at, to = place[some, None], place[None, : some.stop]
            logit = logit.masked_fill(to > at, -torch.inf)
            distant = (to >= SINKS) & (to <= at - self.recent)
            lazy = logit.masked_fill(distant, -torch.inf)
            yield place[some], logit.softmax(-1), lazy.softmax(-1)

    def _repeated(
        self, seen: Int[Tensor, " Q"], start: int
    ) -> tuple[Bool[Tensor, "Q T"], Bool[Tensor, "Q T"]]:
        """Mark the tokens after earlier occurrences of each query's token, and the occurrences."""
        place = torch.arange(int(seen[-1]) + 1, device=seen.device)
        back = seen[:, None] - place
        induction = (back > 0) & ((back + 1) % self.period == 0) & (place > start)
        echo = (back > 0) & (back % self.period == 0) & (place >= start)
        return induction, echo

    def state(self) -> dict[str, Tensor]:
        """Return the accumulated sums and counts."""
        return {name: each.clone() for name, each in self._state.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a state; the results are bitwise those of an uninterrupted run.

        Raises:
            ValueError: the state belongs to another model.
        """
        mine = {name: (x.shape, x.dtype) for name, x in self._state.items()}
        if {name: (x.shape, x.dtype) for name, x in state.items()} != mine:
            raise ValueError("the state is of a model with other sizes; start over")
        self._state = {name: x.clone() for name, x in state.items()}

    def scores(self) -> dict[Kind, Float[Tensor, "N H"]]:
        """Return the scores of all heads by kind.

        Raises:
            ValueError: no tokens were accumulated, or some layers have more than others.
        """
        queries = self._state["queries"]
        if int(queries.min()) == 0 or int(queries.min()) != int(queries.max()):
            raise ValueError(
                f"layers have seen from {int(queries.min())} to {int(queries.max())} queries; feed "
                "all layers the same tokens first"
            )
        output = self._state["output"].sum(-1, keepdim=True)
        loss = self._state["error"] / output.masked_fill(output == 0, 1)
        each = {kind: self._state[kind].amax(-1) / queries[:, None] for kind in _SHARES}
        return {**{kind: found.float() for kind, found in each.items()}, "loss": loss.float()}

    def write(self, path: Path, facts: Calibrated) -> None:
        """Write the scores atomically.

        Raises:
            ValueError: as `scores`.
            OSError: writing failed; an existing file is unchanged.
        """
        header = Facts(
            model=facts.model,
            fingerprint=facts.fingerprint,
            text=facts.text,
            digest=facts.digest,
            tokens=self.tokens,
            period=self.period,
            layers=self.shape.layers,
            heads=self.shape.kv_heads,
        )
        save(path, HeadScores(header, self.scores()))
