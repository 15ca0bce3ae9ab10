"""Native attention of heads of several ranks, group by group."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention_cases import Case
from kv_attention import HeadGroup, attend_ragged
from kv_policy import Observe

HEADS = [torch.tensor([2, 0]), torch.tensor([3]), torch.tensor([1])]
DIMS = [(16, 9), (33, 64), (1, 2)]  # of keys and values, by group
WATCH, MORE = Observe(last=1, group="max"), Observe(last=1, also=frozenset({"squares"}))


class Calls(TorchDispatchMode):
    """Counts the calls of native operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.namespace == "kv_cpu":
            self.names.append(func.name())
        return func(*args, **kwargs or {})


def test_heads_of_any_lengths_and_their_tiers_are_one_call(case: Callable[..., Case]) -> None:
    c = case(2, B=3, H=4, L=1, stored=90, page=16, window=3, tiers=[("8", "4"), ("4", "2")])
    assert len(c.pages[0].length.unique()) > 6
    with Calls() as calls:
        c.attend(backend="cpu")
    assert calls.names == ["kv_cpu::decode"]


@pytest.mark.parametrize("holes", [False, True])
def test_groups_of_heads_give_what_torch_gives(
    near: float, case: Callable[..., Case], holes: bool
) -> None:
    cases = [
        case(i, H=len(heads), D=d, Dv=dv, L=1, stored=70, page=16, window=3, holes=holes)
        for i, (heads, (d, dv)) in enumerate(zip(HEADS, DIMS, strict=True))
    ]
    place = cases[0].position
    q = torch.zeros(2, 4, 2, 1, 33)
    for heads, each in zip(HEADS, cases, strict=True):
        q[:, heads, ..., : each.q.shape[-1]] = each.q
    groups = [
        HeadGroup(heads, (None, *each.pages) if i else (each.pages[0], None), tuple(each.dense))
        for i, (heads, each) in enumerate(zip(HEADS, cases, strict=True))
    ]

    def by(backend: str) -> list[Tensor]:
        found = attend_ragged(q, place, groups, 64, 0.3, WATCH, backend, [MORE])
        squares = [more["squares"] for more in found.others[0].also]
        return [found.out, *found.mass, *found.seen, *found.others[0].mass, *squares]

    with patch("kv_cpu.backend.attend_in_torch", side_effect=AssertionError("it went to torch")):
        native = by("cpu")
    for mine, theirs in zip(native, by("torch"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)
