"""HeadKV: larger budgets for heads that retrieve."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Int
from msgspec import Meta
from torch import Tensor

from kv_evict.by_head_scores import ByHeadScores
from kv_evict.layer_budgets import layers_of, spread
from kv_evict.snapkv import SnapKV
from kv_policy import PlanView


@dataclass(frozen=True)
class HeadKV(ByHeadScores, SnapKV):
    """Score as SnapKV does; a part of every budget goes to heads in proportion to their scores.

    Beside the window, a head keeps 1 - 1 / `beta` of the average, and all heads of the model share
    1 / `beta` of the budget in proportion to the `power` of their scores. These are the formulas of
    `headkv/snapkv_utils.py` of the authors, from a summary. Their scores are of questions that need
    retrieval and reasoning; here they are induction scores on random tokens that repeat. Their
    `beta` is from 1.005 to 10; 1.2 is ours.
    """

    name: ClassVar[str] = "headkv"
    source: ClassVar[str] = "HeadKV, Fu et al., 2024, https://arxiv.org/abs/2410.19258"
    scope = "model"  # heads of all layers share one budget

    beta: Annotated[
        float, Meta(ge=1, description="the budget over the part that heads share by their scores")
    ] = 1.2
    power: Annotated[float, Meta(gt=0, description="exponent of the scores")] = 1.0

    def counts(self, view: PlanView) -> Int[Tensor, "N B H"]:
        """Distribute the budget over all heads.

        Raises:
            ValueError: layers or heads differ from the calibrated model.
        """
        self.heads.expect(self.name, view.shape)
        every = self.heads.on("induction", view.score.device).double() ** self.power
        part = every / every.mean().clamp(min=1e-30)
        mine = part[layers_of(view)][:, None]
        average = (view.budget - self.window).clamp(min=0).double()[:, None]
        asked = average * (1 - 1 / self.beta) + average / self.beta * mine
        return spread(view, self.window, asked, over=(0, 2))
