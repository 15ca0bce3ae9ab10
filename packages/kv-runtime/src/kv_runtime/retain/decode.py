"""A decode step with a selector: one candidate and at most one victim per head."""

from jaxtyping import Float, Int
from torch import Tensor

from kv_policy import DROP, NOBODY, CompleteSelector, StepView
from kv_runtime.batch import Batch, Pass


def step(
    batch: Batch,
    selector: CompleteSelector,
    budget: Int[Tensor, " B"],
    tier_thresholds: Float[Tensor, "K N B H"],
    now: Pass,
    key: Float[Tensor, "S D"],
    value: Float[Tensor, "S Dv"],
    score: Float[Tensor, " S"],
    position: Int[Tensor, " S"],
) -> None:
    """Place each head's candidate (position -1: none) and move or evict one victim.

    All layers, sequences and heads are processed at once, as rows of the page table. The host does
    not synchronize with the device, and the number of tensor operations is proportional to the
    tiers.
    """
    count = batch.tiers.counts()
    lead = count.shape[1:]  # N B H
    recent, until = selector.recent_tokens(budget), None
    if recent is not None:
        until = (now.total - recent)[None, :, None].expand(lead).flatten()
    weakest, place = batch.tiers.weakest(until, selector.victim_tiers)
    answer = selector.step(
        StepView(
            shape=batch.shape,
            first_layer=0,
            candidate=score.view(lead),
            weakest=weakest.view(count.shape),
            count=count,
            tier_thresholds=tier_thresholds,
            length=now.total,
            budget=budget,
        )
    )
    absent = position < 0
    batch.tiers.step(
        candidate=answer.candidate.flatten().masked_fill(absent, DROP),
        victim=answer.victim.flatten().masked_fill(absent, NOBODY),
        target=answer.target.flatten(),
        place=place,
        key=key,
        value=value,
        score=score,
        position=position,
    )
