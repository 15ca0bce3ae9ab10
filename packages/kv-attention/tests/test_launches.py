"""Kernels are launched on the device of their tensors, which is `meta` here, and few are."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch

from kv_attention import DenseTokens
from kv_attention.gpu.arguments import dense_part
from kv_attention.gpu.attention_mass import mass_of_pass, mass_of_step
from kv_attention.gpu.decode import decode
from kv_attention.gpu.prefill import attend_to_all
from kv_attention.gpu.tuning import Machine
from kv_policy import Observe
from launched_kernels import Operations, launched

GPU = torch.device("meta")
MACHINE = Machine("interpreter", 2, False)
PLACED = Observe(None, skip=2)


@pytest.mark.parametrize("L", [1, 6])
def test_every_kernel_is_launched_there(L: int) -> None:
    with launched() as found:
        q = torch.empty(2, 3, 2, L, 16, device=GPU)
        key = torch.empty(2, 3, 7, 16, device=GPU)
        place = torch.empty(2, 7, dtype=torch.long, device=GPU)
        parts = [dense_part(DenseTokens(key, key, place, full=True))] * 2
        places = [place[:, None]] * 2
        position = place[:, :L]
        if L == 1:
            done = decode(q, position, parts, 16, 1.0, MACHINE, watched=True)
            mass_of_step(done, position, parts, places, PLACED)
        else:
            done = attend_to_all(q, position, parts, 16, 1.0, MACHINE)
            mass_of_pass(q, position, done.lse, done.out, parts, places, 1.0, MACHINE, PLACED)
    names = {name for name, _ in found}
    step = {"plan_kernel", "decode_kernel", "combine_kernel", "mass_of_step_kernel"}
    assert names == (step if L == 1 else {"prompt_kernel", "mass_of_pass_kernel"})
    assert {device for _, device in found} == {GPU}


@pytest.mark.parametrize("last", [4, 32])
def test_an_observed_chunk_reads_keys_once_more_for_its_last_queries(case, last: int) -> None:
    """One launch for each part of the tokens, over `last` of all queries, and little in torch."""
    c = case(5, L=64, D=16, Dv=16, stored=20, known=True, tiers=[("8", "4"), ("4", "2")])
    rows: list[int] = []

    def observed(q, *given):
        rows.append(q.shape[3])
        return mass_of_pass(q, *given)

    counts = {}
    for count in (0, last):
        with (
            patch("kv_attention.gpu.attention_mass.mass_of_pass", observed),
            patch("kv_attention.gpu.backend.attention_mass_in_torch", side_effect=AssertionError),
            launched() as found,
            Operations() as operations,
        ):
            c.attend(Observe(count), "triton")
        counts[count] = Counter(name for name, _ in found), operations.found.total()
    kernels, more = counts[last][0] - counts[0][0], counts[last][1] - counts[0][1]
    assert rows == [last]
    assert kernels == {"mass_of_pass_kernel": 3}
    assert more <= 45  # most are views, and the rest a few launches over the last queries
