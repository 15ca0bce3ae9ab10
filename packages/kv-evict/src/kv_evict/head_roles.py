"""Base of methods in which some heads keep every token, and the others both ends."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_evict.by_head_scores import ByHeadScores
from kv_evict.ends import keep_ends, step_ends
from kv_evict.heads_file import Kind
from kv_policy import LayerView, PlanView, Step, StepView, protect


@dataclass(frozen=True)
class HeadRoles(ByHeadScores):
    """Base of methods that find roles of heads in a file of `kv-serve calibrate heads`.

    A method defines `shares`, `sinks`, and `newest`. There is no budget: heads that retrieve keep
    every token, and the others the first `sinks` and the newest, after a prompt and at every decode
    step. A token's score is its position. Roles do not depend on the text, so heads can be sharded.
    """

    decode = "step"  # each generated token evicts the oldest of a head that does not retrieve

    @property
    def shares(self) -> tuple[tuple[Kind, float], ...]:
        """Shares of the model's heads that keep every token, by the score they are best in."""
        raise TypeError(f"{type(self).__name__} must define shares")

    @property
    def sinks(self) -> int:
        """First tokens of a sequence, which every head keeps."""
        return 0

    def newest(self, length: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Return the number of newest tokens that every head keeps, for sequences so long."""
        raise TypeError(f"{type(self).__name__} must define newest(length)")

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the position of a token, and infinity for a sink."""
        return protect(view.position.to(view.score.dtype), view, first=self.sinks)

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Keep both ends, and all tokens of heads that retrieve.

        Raises:
            ValueError: layers or heads differ from the calibrated model.
        """
        n, b, h, _ = view.position.shape
        lazy = self._lazy(view, n, h, view.position.device)[:, None].expand(n, b, h)
        return keep_ends(view, lazy, self.sinks, self.newest(view.length))

    def step(self, view: StepView) -> Step:
        """Admit the candidate, and evict the oldest token of heads that do not retrieve.

        Raises:
            ValueError: layers or heads differ from the calibrated model.
        """
        n, b, h = view.candidate.shape
        lazy = self._lazy(view, n, h, view.candidate.device)[:, None].expand(n, b, h)
        return step_ends(view, lazy, self.newest(view.length))

    def _lazy(
        self, view: PlanView | StepView, layers: int, heads: int, device: torch.device
    ) -> Bool[Tensor, "N H"]:
        """Mark the heads that do not retrieve, in so many layers and heads of a view."""
        self.heads.expect(self.name, view.shape)
        every = self.heads.retrieving(self.shares, device)
        first = view.shape.first_head
        return ~every[view.first_layer : view.first_layer + layers, first : first + heads]
