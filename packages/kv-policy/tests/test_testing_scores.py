"""The conformance check detects each law that scores can break."""

import pytest
import torch
from torch import Tensor

from kv_policy import DROP, LayerView, Observe, PlanView, RunningMean, RunningSum, protect
from kv_policy.testing import check_policy
from lawful import Good, refusal


class Impure(Good):
    def score(self, view: LayerView) -> Tensor:
        return super().score(view) + torch.rand(())


class Writes(Good):
    def score(self, view: LayerView) -> Tensor:
        return protect(view.score.add_(1), view, first=self.sinks)


class Flat(Good):
    def score(self, view: LayerView) -> Tensor:
        return super().score(view).sum(1)


class WritesMore(Good):
    """Modifies the sums in `also`, beside the first."""

    observe = Observe(last=4, skip=1, generated=True, also=frozenset({"squares"}))

    def score(self, view: LayerView) -> Tensor:
        view.also["squares"].add_(1)
        return super().score(view)


class FirstLayer(Good):
    """Treats all rows as the first layer's, as if a view had one layer."""

    def score(self, view: LayerView) -> Tensor:
        return self.protect(view.keys.norm(dim=-1) * (1 + view.layer[0]), view)


class FirstLayerGrowing(FirstLayer):
    """Likewise; its generated tokens grow the cache, and are still scored."""

    decode = "grow"
    observe = Observe(last=4, generated=True)


class FirstLayerOfPrompts(FirstLayer):
    """Likewise; its generated tokens are not scored."""

    decode = "grow"


class FirstLayerGauged(Good):
    """Likewise, in the numbers of its heads alone."""

    def head_stats(self, view: LayerView) -> Tensor:
        return (1.0 + view.layer[0]).expand(view.position.shape[:2])


class ByLayer(Good):
    """Depends on the layer, row by row."""

    def score(self, view: LayerView) -> Tensor:
        return self.protect(view.keys.norm(dim=-1) * (1 + view.layer)[:, None, None], view)


class Nan(Good):
    def score(self, view: LayerView) -> Tensor:
        return super().score(view).where(view.position != 1, torch.nan)


class Sized(Good):
    @property
    def observe(self) -> Observe:
        return Observe(last=4, skip=2, generated=True)

    def score(self, view: LayerView) -> Tensor:
        return protect(view.mass / view.seen, view, first=self.sinks)  # 0 / 0 is NaN


class Careful(Good):
    """Uses values without declaring them in `reads`."""

    def score(self, view: LayerView) -> Tensor:
        return view.values.norm(dim=-1)


class Overprotects(Good):
    def score(self, view: LayerView) -> Tensor:
        return protect(super().score(view), view, first=self.sinks + 1)


class Clings(Good):
    """Protects the newest token, whose score is kept when it is no longer the newest."""

    recent = 1

    def score(self, view: LayerView) -> Tensor:
        return protect(view.position.float(), view, first=self.sinks, last=1)


class Mixes(Good):
    def score(self, view: LayerView) -> Tensor:
        return super().score(view) - view.length.float().mean()


class Padded(Good):
    def score(self, view: LayerView) -> Tensor:
        return super().score(view) + view.position.shape[-1]


class Normalized(Good):
    """Heads compete, but splits_heads is True."""

    def score(self, view: LayerView) -> Tensor:
        norm = view.keys.norm(dim=-1)
        return protect(norm / norm.sum(1, keepdim=True).clamp(min=1), view, first=self.sinks)


class Averaged(Good):
    """Declares running means, and returns other scores."""

    @property
    def running(self) -> RunningMean:
        return RunningMean()


class Watched(Averaged):
    @property
    def observe(self) -> Observe:
        return Observe(skip=1, generated=True)


class Nearest(Averaged):
    @property
    def observe(self) -> Observe:
        return Observe(generated=True)


class Summed(Nearest):
    """Declares running sums, and returns other scores."""

    @property
    def running(self) -> RunningSum:
        return RunningSum()


class Favours(Summed):
    """Declares running sums, and gives new tokens other scores."""

    def score(self, view: LayerView) -> Tensor:
        return (view.score + view.mass + view.fresh.float()).masked_fill(view.position < 0, 0)


class Recent(Good):
    """Scores a prompt by its last queries."""

    decode = "grow"
    observe = Observe(last=4)
    scores_last = True

    def score(self, view: LayerView) -> Tensor:
        mean = view.mass / view.seen.clamp(min=1)
        share = (view.seen.amax(-1, keepdim=True) / 4).clamp(max=1)
        past = view.score.masked_fill(view.score.isinf(), 0)
        return self.protect(past.lerp(mean, share.masked_fill(past == 0, 1)), view)


class Remembers(Recent):
    """Adds what the last queries give to what earlier ones gave."""

    def score(self, view: LayerView) -> Tensor:
        past = view.score.masked_fill(view.score.isinf(), 0)
        return self.protect(past + view.mass, view)


class RemembersProtection(Recent):
    """Keeps on protecting what it has protected."""

    def score(self, view: LayerView) -> Tensor:
        return super().score(view).where(view.score.isfinite(), torch.inf)


class Adjusts(Good):
    """Scores a token once, and adjusts that by attention."""

    decode = "grow"
    scores_once = True
    observe = Observe(last=4)

    def adjust(self, view: LayerView) -> Tensor:
        return view.score + view.mass


class AdjustsToNan(Adjusts):
    def adjust(self, view: LayerView) -> Tensor:
        return view.score.where(view.position != 1, torch.nan)


class AdjustsFlat(Adjusts):
    def adjust(self, view: LayerView) -> Tensor:
        return view.mass.sum(1)


class AdjustsByKeys(Adjusts):
    def adjust(self, view: LayerView) -> Tensor:
        return view.keys.norm(dim=-1)


class AdjustsAndWrites(Adjusts):
    def adjust(self, view: LayerView) -> Tensor:
        return view.score + view.mass.mul_(2)


class AdjustsAcross(Adjusts):
    def adjust(self, view: LayerView) -> Tensor:
        return view.score - view.length.float().mean()


class Rescores(Good):
    """Plans by how far keys are from the mean of those that are held."""

    decode = "grow"

    def rescore(self, view: LayerView) -> Tensor:
        count = (view.position >= 0).sum(-1, keepdim=True).clamp(min=1)
        mean = view.keys.sum(2, keepdim=True) / count[..., None]
        score = view.score.masked_fill(view.score.isinf(), 0)
        return self.protect(score + (view.keys - mean).norm(dim=-1), view)


class RescoresToNan(Rescores):
    def rescore(self, view: LayerView) -> Tensor:
        return super().rescore(view).where(view.position != 1, torch.nan)


class RescoresFlat(Rescores):
    def rescore(self, view: LayerView) -> Tensor:
        return super().rescore(view).sum(1)


class RescoresByMass(Rescores):
    observe = Observe(last=4)

    def rescore(self, view: LayerView) -> Tensor:
        return view.mass + view.score


class RescoresAtRandom(Rescores):
    def rescore(self, view: LayerView) -> Tensor:
        return super().rescore(view) + torch.rand(())


class RescoresAndWrites(Rescores):
    def rescore(self, view: LayerView) -> Tensor:
        view.keys.mul_(2)
        return super().rescore(view)


class RescoresAcross(Rescores):
    def rescore(self, view: LayerView) -> Tensor:
        return super().rescore(view) - view.length.float().mean()


class RescoresPadding(Rescores):
    def rescore(self, view: LayerView) -> Tensor:
        return super().rescore(view) - view.keys.mean(2).norm(dim=-1, keepdim=True)


class RescoresHeads(Rescores):
    """Heads compete, but splits_heads is True."""

    def rescore(self, view: LayerView) -> Tensor:
        return super().rescore(view) - view.keys.sum((1, 2, 3))[:, None, None]


class RescoresOverprotecting(Rescores):
    def rescore(self, view: LayerView) -> Tensor:
        return protect(super().rescore(view), view, first=self.sinks + 1)


class RescoresAndDrops(Rescores):
    """Protects by its new scores, and plans by position."""

    sinks = 0

    def rescore(self, view: LayerView) -> Tensor:
        return protect(super().rescore(view), view, first=self.protected)

    @property
    def protected(self) -> int:
        return 3

    def plan(self, view: PlanView) -> Tensor:
        plan = super().plan(view)
        return plan.masked_fill(view.position < 3, DROP)


@pytest.mark.parametrize("over", [0, -3])
def test_a_sum_is_divided_by_1_or_more(over: int) -> None:
    with pytest.raises(ValueError, match=f"over={over} must be 1 or more"):
        RunningSum(over)


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Impure, "score differs on a second call"),
        (Writes, "score changed the view's score"),
        (WritesMore, "score changed the view's squares"),
        (FirstLayer, "score of a view of several layers differs from that of each layer alone"),
        (FirstLayerGrowing, "score of a view of several layers differs from that of each layer"),
        (FirstLayerOfPrompts, "score of a view of several layers differs from that of each layer"),
        (FirstLayerGauged, "head_stats of a view of several layers differs from that of each"),
        (Flat, "score returns torch.float32 of shape"),
        (Nan, "score is NaN for a token"),
        (Sized, "score is NaN for a token"),
        (Careful, "score failed on a view with only what the selector observes and reads"),
        (Overprotects, "score is infinite for more tokens of a head than the 3 protected"),
        (Clings, "queries it is never scored again and stays protected"),
        (Mixes, "scores of a sequence depend on the other sequences, or on its padding"),
        (Padded, "scores of a sequence depend on the other sequences, or on its padding"),
        (Averaged, "so observe must have generated=True"),
        (Nearest, "so observe must have skip=1"),
        (Watched, "score of a stored token, for which a generated query was observed, differs"),
        (Summed, "score of a stored token, for which a generated query was observed, differs"),
        (Favours, "score of a new token, for which a generated query was observed, differs"),
        (Remembers, "score of a pass with the last 4 queries of a prompt depends on stored scores"),
        (RemembersProtection, "prompt depends on stored scores, though scores_last is True"),
        (AdjustsToNan, "adjust returns NaN for a token"),
        (AdjustsFlat, "adjust returns torch.float32 of shape"),
        (AdjustsByKeys, "adjust failed on a view without vectors"),
        (AdjustsAndWrites, "score changed the view's mass"),
        (AdjustsAcross, "scores of a sequence depend on the other sequences, or on its padding"),
        (RescoresToNan, "rescore returns NaN for a token"),
        (RescoresFlat, "rescore returns torch.float32 of shape"),
        (RescoresByMass, "rescore failed on a view without observations and queries"),
        (RescoresAtRandom, "rescore differs on a second call"),
        (RescoresAndWrites, "rescore changed the view's keys"),
        (RescoresAcross, "scores of rescore of a sequence depend on the other sequences"),
        (RescoresPadding, "scores of rescore of a sequence depend on the other sequences"),
        (RescoresHeads, "scores of rescore of a shard of the heads differ from the whole's"),
        (RescoresOverprotecting, "rescore is infinite for more tokens of a head than the 3"),
        (RescoresAndDrops, "plan drops a protected token, whose score is infinite"),
        (Normalized, "scores of a shard of the heads differ from the whole's"),
    ],
)
def test_a_broken_policy_is_told_its_law(broken: type[Good], law: str) -> None:
    assert law in refusal(broken())


def test_a_score_may_go_by_the_layer_of_a_row() -> None:
    check_policy(ByLayer())


def test_a_plan_may_go_by_scores_of_its_own() -> None:
    check_policy(Rescores())


def test_a_score_may_go_by_the_last_queries_of_a_prompt() -> None:
    check_policy(Recent())


def test_a_score_of_a_token_alone_may_be_adjusted() -> None:
    check_policy(Adjusts())
