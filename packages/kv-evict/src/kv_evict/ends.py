"""Heads that hold only both ends of a sequence: sinks and the newest tokens."""

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from kv_policy import DROP, NOBODY, PlanView, Step, StepView


def keep_ends(
    view: PlanView, lazy: Bool[Tensor, "N B H"], sinks: int, recent: Int[Tensor, " B"]
) -> UInt8[Tensor, "N B H L"]:
    """Keep the first `sinks` and newest `recent` tokens of lazy heads, and all of the others.

    Args:
        view: the tokens.
        lazy: heads that keep only both ends.
        sinks: first tokens of a sequence.
        recent: newest tokens of each sequence.

    Returns:
        0 for a token that stays, or DROP.
    """
    newest = (view.length - recent)[None, :, None, None]
    ends = (view.position < sinks) | (view.position >= newest)
    keep = (view.position >= 0) & (ends | ~lazy[..., None])
    return torch.where(keep, 0, DROP).to(torch.uint8)


def step_ends(view: StepView, lazy: Bool[Tensor, "N B H"], recent: Int[Tensor, " B"]) -> Step:
    """Admit the candidate, and evict a lazy head's oldest token if it is not among the newest.

    Scores are positions, infinite for sinks. A step moves one token out of the newest, so at most
    one is evicted; a candidate that leaves a raw window longer than `recent` is itself dropped.
    """
    newest = (view.length - recent)[None, :, None]
    candidate = torch.where(lazy & (view.candidate < newest), DROP, 0)
    victim = torch.where(lazy & (view.weakest[0] < newest), 0, NOBODY)
    each = (candidate, victim, torch.full_like(victim, DROP))
    return Step(*(x.to(torch.uint8) for x in each))
