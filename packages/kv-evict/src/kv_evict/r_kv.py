"""R-KV: tokens that are attended to and whose keys do not repeat those of other tokens."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

import torch
from jaxtyping import Bool, Float
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import normalize

from kv_evict.pooling import expect_odd, pool
from kv_evict.running import running_mean
from kv_policy import Evictor, LayerView, Observe, Replan, RunningMean

_TOGETHER: Final = 1 << 22  # cosines computed at once, which bounds the memory


@dataclass(frozen=True)
class RKV(Evictor):
    """Keep the newest `window` tokens, and attended tokens that no other token repeats.

    A token's score in a plan is `weight` times its importance minus (1 - `weight`) times its
    redundancy. The importance is the attention it receives from a query of the last `window`, the
    maximum over the query heads of its KV head, as a mean over those queries, and the maximum over
    `pool` neighbouring positions. The redundancy is the mean cosine similarity of its key to the
    other keys of its head, after a softmax over the head's tokens. Each key leaves out its
    similarity to the newest of the keys that are more similar to it than `similar`, so of tokens
    that repeat each other the newest stays.

    During generation every sequence is compressed to the budget again after `every` tokens; 0
    compresses prompts alone. The importance is then a moving average over queries, whose weights
    decay: its past weighs half a window. `uncompressed`, `short` and `most` are those of Replan.

    The formulas are those of `rkv/compression/r1_kv.py` and `rkv/utils.py` of the authors'
    repository, read; the weight is the paper's, the code has 0.07. There attention is normalized
    over the tokens before the window alone, after the maximum over the logits of a group, and a key
    without a similar one leaves out its similarity to the head's first token.
    """

    name: ClassVar[str] = "r-kv"
    source: ClassVar[str] = "R-KV, Cai et al., 2025, https://arxiv.org/abs/2505.24133"
    reads = frozenset({"keys"})

    window: Annotated[
        int, Meta(ge=1, description="newest tokens: always kept, their queries observed")
    ] = 8
    pool: Annotated[int, Meta(ge=1, description="neighbouring positions to max-pool over; odd")] = 7
    weight: Annotated[
        float, Meta(ge=0, le=1, description="weight of importance; the rest is of redundancy")
    ] = 0.1
    similar: Annotated[
        float, Meta(ge=0, le=1, description="cosine above which the newest key is no repetition")
    ] = 0.5
    every: Annotated[int, Meta(ge=0, description="generated tokens between plans; 0: none")] = 128
    uncompressed: Annotated[
        int, Meta(ge=0, description="new tokens of the batch that start a plan; 0: never")
    ] = 0
    short: Annotated[bool, Meta(description="plan when the pool has no free page")] = False
    most: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="maximum tokens per plan, over layers and heads"),
    ] = None

    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            ValueError: a budget below the window, or an even `pool`.
        """
        super().__post_init__()
        expect_odd(self.name, self.pool)

    @property
    def recent(self) -> int:
        """The window."""
        return self.window

    @property
    def observe(self) -> Observe:
        """The last queries of a prompt, and generated ones if they are planned by."""
        return Observe(last=self.window, group="max", skip=1, generated=self.replan.generating)

    @property
    def replan(self) -> Replan:
        """Replanning as the parameters set it."""
        return Replan(self.every, self.uncompressed, self.short, self.most)

    @property
    def running(self) -> RunningMean | None:
        """The average that `score` updates during generation, if generated queries are observed."""
        return RunningMean(self._past) if self.replan.generating else None

    @property
    def _past(self) -> int:
        """Weight of past queries: then they are about as old on average as those of a window."""
        return max(1, self.window // 2)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the mean attention from the last queries, which a short pass replaces in part."""
        if view.mass is None or view.seen is None:
            return view.score  # a generated token, which nothing was observed for
        if view.generated:
            return running_mean(view, view.score, self._past)
        seen = view.seen.to(view.score.dtype)
        mean = view.mass.to(view.score.dtype) / seen.clamp(min=1)
        share = (seen / self.window).masked_fill(view.score == 0, 1)
        return torch.lerp(view.score, mean, share)

    def rescore(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return importance minus redundancy, weighted."""
        assert view.keys is not None  # they are read
        held = view.position >= 0
        older = held & (view.position < view.length[:, None, None] - self.window)
        importance = pool(view.score, view.position, older, self.pool, "max")
        redundancy = _redundancy(view.keys, held, self.similar).to(importance.dtype)
        return self.weight * importance - (1 - self.weight) * redundancy


def _redundancy(
    keys: Float[Tensor, "B H L D"], held: Bool[Tensor, "B H L"], similar: float
) -> Float[Tensor, "B H L"]:
    """Return the softmax of each key's mean similarity to the others; 0 in empty slots."""
    unit = normalize(keys, dim=-1)  # zeros in empty slots
    place = torch.arange(keys.shape[2], device=keys.device, dtype=torch.int32)
    total = torch.zeros_like(held, dtype=torch.float64)
    rows = max(1, _TOGETHER // max(1, held.numel()))
    for first in range(0, keys.shape[2], rows):
        some = slice(first, first + rows)
        cosine = unit[:, :, some] @ unit.mT
        cosine.masked_fill_(place[some, None] == place, 0)
        newest = place.where(cosine > similar, -1).amax(-1, keepdim=True)
        total += cosine.masked_fill_(newest == place, 0).sum(-2)
    mean = total / held.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~held, -torch.inf).softmax(-1).masked_fill(~held, 0)
