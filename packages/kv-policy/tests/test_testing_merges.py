"""The conformance check detects each law that merges can break."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kv_policy import CompositionError, Evictor, LayerView, Merge, MergeView, complete, compose
from kv_policy.sorted_selector import SortedSelector
from kv_policy.testing import check_policy
from lawful import Good, refusal


@dataclass(frozen=True)
class Merges(Good):
    """Merges each dropped token into the first kept one of its head."""

    name: ClassVar[str] = "merges"
    decode = "grow"

    def merge(self, view: MergeView) -> Merge:
        target = view.kept.long().argmax(-1, keepdim=True).expand_as(view.position)[..., None]
        weight = (view.kept.any(-1, keepdim=True) & view.dropped).float()[..., None] / 2
        return Merge(target, weight, threshold=view.threshold + 1)


class Twice(Merges):
    def merge(self, view: MergeView) -> Merge:
        right = super().merge(view)
        return replace(right, weight=right.weight * torch.rand(()))


class Writes(Merges):
    def merge(self, view: MergeView) -> Merge:
        view.keys.add_(1)
        return super().merge(view)


class Nothing(Merges):
    def merge(self, view: MergeView) -> None:
        return None


class Flat(Merges):
    def merge(self, view: MergeView) -> Merge:
        right = super().merge(view)
        return Merge(right.target[:, :1], right.weight[:, :1])


class Lost(Merges):
    def merge(self, view: MergeView) -> Merge:
        right = super().merge(view)
        return replace(
            right, target=torch.arange(view.position.shape[-1])[:, None].expand_as(right.target)
        )


class Infinite(Merges):
    def merge(self, view: MergeView) -> Merge:
        right = super().merge(view)
        return replace(right, weight=right.weight / 0 * 1)


class Mixes(Merges):
    """Weighs by the tokens of all sequences."""

    def merge(self, view: MergeView) -> Merge:
        right = super().merge(view)
        return replace(right, weight=right.weight / view.dropped.sum())


class MixesHeads(Merges):
    """Weighs by the tokens of all heads."""

    def merge(self, view: MergeView) -> Merge:
        right, gone = super().merge(view), view.dropped.sum((1, 2)).clamp(min=1)
        return replace(right, weight=right.weight / gone[:, None, None, None])


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Twice, "merge gives another weight on a second call"),
        (Writes, "merge changed the view's keys"),
        (Nothing, "it must return a Merge"),
        (Flat, "both must be of"),
        (Lost, "merge targets a token that is not kept"),
        (Infinite, "merge returns a number that is not finite"),
        (Mixes, "merges of a sequence depend on the other sequences"),
        (MixesHeads, "merges of a shard of the heads differ"),
    ],
)
def test_a_broken_policy_is_told_its_law(broken: type[Merges], law: str) -> None:
    assert law in refusal(broken())


def test_a_policy_that_merges_is_lawful() -> None:
    check_policy(Merges())


class Steps(Merges):
    decode = "step"


class Chunks(Merges):
    plans_chunks = True


@pytest.mark.parametrize(
    ("policy", "what"), [(Steps(), "decode='step'"), (Chunks(), "plans_chunks=True")]
)
def test_tokens_are_dropped_by_whole_plans_alone(policy: Merges, what: str) -> None:
    with pytest.raises(TypeError, match=f"has merge\\(view\\) and {what}"):
        complete(policy)


@dataclass(frozen=True)
class Plain(Evictor):
    """Keeps the tokens of small position."""

    name: ClassVar[str] = "plain"

    def score(self, view: LayerView) -> Tensor:
        return -view.position.float()


class Stepping(Plain):
    name: ClassVar[str] = "stepping"
    decode = "step"


def test_one_that_merges_and_one_that_evicts_are_one() -> None:
    merges, plain = Merges(), Plain()
    policy = compose(merges, plain)
    assert str(policy) == "plain+merges"
    assert policy.selector is not None
    both = complete(policy.selector)
    assert both.score == plain.score
    assert both.merge == merges.merge
    assert both.protected == 0
    assert not both.reads
    check_policy(policy)


def test_what_two_cannot_do_together_is_refused() -> None:
    with pytest.raises(CompositionError, match="both define which tokens are kept"):
        compose(Merges(), replace(Merges(), sinks=4))
    with pytest.raises(CompositionError, match="stepping drops tokens at decode steps"):
        compose(Merges(), Stepping())
    with pytest.raises(CompositionError, match="its own budget has no effect"):
        compose(Merges.from_text({"budget": "77"}), Plain())


def test_one_that_sorts_merges_what_its_evictor_merges() -> None:
    merges = Merges()
    assert complete(SortedSelector(merges, Plain())).merge == merges.merge
    assert complete(SortedSelector(Plain(), Plain())).merge is None
