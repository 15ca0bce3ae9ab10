"""H2O: the tokens with the most accumulated attention, and the newest tokens."""

from dataclasses import dataclass
from typing import ClassVar

from kv_evict.heavy_hitters import HeavyHitters
from kv_policy import Observe, RunningSum


@dataclass(frozen=True)
class H2O(HeavyHitters):
    """Keep heavy hitters, and as `recent` of the budget the newest tokens, at every step.

    A token's score is the attention it receives from all queries, its own included, summed over the
    queries and averaged over the query heads of its KV head (`group`). Once the budget is full,
    each generated token evicts the token with the lowest score outside the newest.

    The sum is that of the authors' `h2o_hf/utils_hh/modify_llama.py`, read: older tokens have seen
    more queries and are favoured. Their published runs mask evicted tokens; here they are removed.
    """

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "H2O, Zhang et al., 2023, https://arxiv.org/abs/2306.14048"
    decode = "step"  # each generated token evicts another once the budget is full
    running = RunningSum()  # the sum that `score` updates

    @property
    def observe(self) -> Observe:
        """Every query, of the prompt and generated."""
        return Observe(last=None, group=self.group, generated=True)
