"""The conformance check detects each law that steps can break."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kv_policy import DROP, NOBODY, LayerView, Part, Selecting, Step, StepView
from kv_policy.testing import check_policy
from lawful import Good, refusal


class Failing(Good):
    def step(self, view: StepView) -> Step:
        raise RuntimeError("no steps")


class Hoards(Good):
    def step(self, view: StepView) -> Step:
        step = super().step(view)
        return replace(step, victim=torch.full_like(step.victim, NOBODY))


class Climbs(Good):
    def step(self, view: StepView) -> Step:
        step = super().step(view)
        return replace(step, target=torch.zeros_like(step.target))


class Empty(Good):
    def step(self, view: StepView) -> Step:
        step = super().step(view)
        return replace(step, victim=torch.zeros_like(step.victim))


class Elsewhere(Good):
    def step(self, view: StepView) -> Step:
        step = super().step(view)
        return replace(step, candidate=torch.where(step.candidate == 0, 9, DROP).to(torch.uint8))


class Meets(Good):
    """A step depends on the other sequences."""

    def step(self, view: StepView) -> Step:
        mean = view.candidate.mean().expand_as(view.candidate)
        return super().step(replace(view, candidate=mean))


class Layers(Good):
    """A step depends on the other layers, though they are planned separately."""

    def step(self, view: StepView) -> Step:
        mean = view.candidate.mean(0, keepdim=True).expand_as(view.candidate)
        return super().step(replace(view, candidate=mean))


class FromFirst(Good):
    """A step treats all layers as the first in view."""

    def step(self, view: StepView) -> Step:
        return super().step(replace(view, candidate=view.candidate + 9 * view.first_layer))


class Reads(Good):
    """A step reads on the host how full the tiers are."""

    decodes_on_device = True

    def step(self, view: StepView) -> Step:
        assert int(view.count.max()) >= 0
        return super().step(view)


class Looks(Good):
    """So do scores, of the keys."""

    decodes_on_device = True

    def score(self, view: LayerView) -> Tensor:
        assert view.keys is not None
        assert not view.keys.isnan().any()
        return super().score(view)


class Blind(Good):
    """A step moves the weakest token of the only tier, and declares that none has victims."""

    victim_tiers = 0


class Peeks(Good):
    """A step moves no token, and places by the weakest one nevertheless."""

    victim_tiers = 0

    def step(self, view: StepView) -> Step:
        step = super().step(view)
        candidate = torch.where(view.candidate > view.weakest[0], 0, DROP).to(torch.uint8)
        return replace(step, candidate=candidate, victim=torch.full_like(step.victim, NOBODY))


class Stepless(Selecting):
    """Declares steps without a `step`."""

    name = "stepless"
    decode = "step"


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Failing, "step failed, though decode is 'step': RuntimeError: no steps"),
        (Hoards, "a step makes a sequence grow beyond its budget"),
        (Climbs, "a step moves its victim neither to a later tier nor to DROP"),
        (Empty, "a step takes its victim from an empty tier"),
        (Elsewhere, "a step sends the candidate to a tier other than 0 to 0 and DROP"),
        (Layers, "a step of several layers differs from the step of each alone"),
        (FromFirst, "a step of several layers differs from the step of each alone"),
        (Stepless, "Stepless has decode='step' but no step(view); define it, or set decode='grow'"),
        (Meets, "a step depends on other sequences"),
        (Blind, "a step's victim is in a tier after the first 0, though victim_tiers is 0"),
        (Peeks, "a step depends on the weakest token of a tier after the first 0"),
        (Reads, "step reads numbers on the host, though decodes_on_device is True"),
        (Looks, "score reads numbers on the host, though decodes_on_device is True"),
    ],
)
def test_a_broken_policy_is_told_its_law(broken: type[Part], law: str) -> None:
    assert law in refusal(broken())


def test_a_step_of_a_shard_is_checked() -> None:
    class Neighbours(Good):
        def step(self, view: StepView) -> Step:
            return super().step(replace(view, candidate=view.candidate.roll(1, -1)))

    with pytest.raises(AssertionError, match="a step of a shard of the heads differs"):
        check_policy(Neighbours())
