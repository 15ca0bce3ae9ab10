"""Kernels are compiled once for a policy and a model, whatever a step or a request is like."""

from dataclasses import replace
from typing import no_type_check

import pytest
import torch
import triton
import triton.language as tl

from attention_cases import Case
from kernel_keys import compiled_keys, misaligned
from kv_attention.gpu.decode import plan_kernel
from kv_policy import Observe

WATCHED = {
    "unobserved": Observe(last=0),
    "the last": Observe(last=4),
    "the last, far away": Observe(last=4, skip=3),
}
# Sequences, stored tokens and columns of the tables of several steps, with 1 and multiples of 16.
STEPS = [(1, 4, 1), (2, 60, 17), (16, 9, 3), (3, 200, 64)]
TIERS = [("8", "4"), ("4", "2")]


def columns(c: Case, count: int) -> Case:
    """Give the tables of a case more columns, whose contents are not page numbers."""
    pages = [
        replace(p, table=torch.nn.functional.pad(p.table, (0, max(count - p.table.shape[2], 0))))
        for p in c.pages
    ]
    return replace(c, pages=pages)


def sliced(c: Case) -> Case:
    """Give the addresses of numbers an odd multiple of their size, as those of slices have."""
    pages = [replace(p, table=misaligned(p.table), length=misaligned(p.length)) for p in c.pages]
    dense = [replace(d, position=misaligned(d.position)) for d in c.dense]
    places = [misaligned(place) for place in c.page_positions]
    moved = replace(c, position=misaligned(c.position), pages=pages, dense=dense)
    return replace(moved, page_positions=places)


def over_tokens(c: Case) -> Case:
    """Store queries and keys by token, as a model projects them."""
    turned = [
        replace(d, **{x: by_token(getattr(d, x), (0, 2, 1, 3)) for x in ("key", "value")})
        for d in c.dense
    ]
    return replace(c, q=by_token(c.q, (0, 3, 1, 2, 4)), dense=turned)


def by_token(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    back = torch.tensor(order).argsort().tolist()
    return x.permute(order).contiguous().permute(back)


@pytest.mark.parametrize("D", [128, 40, 5])
@pytest.mark.parametrize("watch", WATCHED.values(), ids=WATCHED)
def test_decode_steps(case, watch, D):
    with compiled_keys() as keys:
        for B, stored, count in STEPS:
            c = case(B, B=B, L=1, D=D, Dv=D, tiers=TIERS, stored=stored, dtype=torch.bfloat16)
            for each in (c, sliced(c), over_tokens(c)):
                columns(each, count).attend(watch, "triton")
    expected = {"plan_kernel": 1, "decode_kernel": 2, "combine_kernel": 1}  # two kinds of pages
    if watch.last:
        expected["mass_of_step_kernel"] = 1
    assert {name: len(found) for name, found in keys.items()} == expected


@pytest.mark.parametrize("D", [128, 40, 5])
@pytest.mark.parametrize("watch", WATCHED.values(), ids=WATCHED)
def test_chunks_of_prompts(case, watch, D):
    with compiled_keys() as keys:
        for (B, stored, count), L in zip(STEPS, (3, 32, 7, 129), strict=True):
            c = case(B, B=B, L=L, D=D, Dv=D, tiers=TIERS, stored=stored, dtype=torch.bfloat16)
            for each in (c, sliced(c), over_tokens(c)):
                columns(each, count).attend(watch, "triton")
    expected = {"prompt_kernel": 3}  # two kinds of pages, and the chunk
    if watch.last:
        expected["mass_of_pass_kernel"] = 3
    assert {name: len(found) for name, found in keys.items()} == expected


def test_what_a_kernel_is_compiled_for_is_seen():
    """A number that is specialized, as the tests above would find it."""
    x = torch.empty(32)
    with compiled_keys() as keys:
        for scale in (1, 2, 16):
            plan_kernel[(1,)](x, x, 5, 8, BLOCK=scale, WIDE=16)
            number_kernel[(1,)](x, scale)
    assert {name: len(found) for name, found in keys.items()} == {
        "plan_kernel": 3,
        "number_kernel": 3,
    }


@triton.jit
@no_type_check
def number_kernel(x, number):
    """Specialize a number."""
    tl.store(x, number)
