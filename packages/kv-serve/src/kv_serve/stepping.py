"""A decoding step under a selector: one candidate and at most one victim per head."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_policy import DROP, NOBODY, Selector, StepView
from kv_serve.batch import Batch, Pass


def step(
    batch: Batch,
    selector: Selector,
    budget: Int[Tensor, " B"],
    cuts: Float[Tensor, "K N B H"],
    now: Pass,
    key: Float[Tensor, "S 1 D"],
    value: Float[Tensor, "S 1 Dv"],
    score: Float[Tensor, "S 1"],
    position: Int[Tensor, "S 1"],
) -> None:
    """Let the selector place each head's candidate (position -1: none) and move one victim.

    All layers, sequences and heads go at once; a row is a stream of the stores.
    """
    streams, lead = batch.streams(), batch.stores[0].length.shape  # N B H
    found = [store.weakest(streams) for store in batch.stores]
    answer = selector.step(
        StepView(
            shape=batch.shape,
            first_layer=0,
            candidate=score.view(lead),
            weakest=torch.stack([weakest.view(lead) for weakest, _ in found]),
            count=torch.stack([s.length.long() for s in batch.stores]),
            cuts=cuts,
            length=now.total,
            budget=budget,
        )
    )
    absent = position[:, 0] < 0
    candidate = answer.candidate.flatten().masked_fill(absent, DROP)
    victim = answer.victim.flatten().masked_fill(absent, NOBODY)
    target = answer.target.flatten()
    for tier, (store, (_, slot)) in enumerate(zip(batch.stores, found, strict=True)):
        mine = (victim == tier) & (slot >= 0)
        # A victim that goes for good leaves its place to a candidate of the same tier.
        swap = mine & (candidate == tier) & (target == DROP)
        store.replace(
            streams,
            slot.masked_fill(~swap, -1),
            key[:, 0],
            value[:, 0],
            score[:, 0],
            position[:, 0],
        )
        _move(batch, tier, slot.masked_fill(~(mine & ~swap), -1), target)
        enters = (candidate == tier) & ~swap
        store.append(streams, key, value, enters[:, None], score, position)


def _move(batch: Batch, tier: int, slot: Int[Tensor, " S"], target: Tensor) -> None:
    """Take victims (slot -1: none) out of their tier, into a later one or away."""
    store, streams = batch.stores[tier], batch.streams()
    down = (slot >= 0) & (target != DROP)
    if bool(down.any()):
        read = store.fetch(streams, slot.masked_fill(~down, -1))
        assert read.key is not None  # fetch decodes both
        assert read.value is not None
        for index, later in enumerate(batch.stores):
            enters = (down & (target == index))[:, None]
            later.append(streams, read.key, read.value, enters, read.score, read.position)
    store.remove(streams, slot)
