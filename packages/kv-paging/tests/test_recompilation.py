"""Page kernels are compiled once for a policy and a model, whatever a step or a request is like."""

import pytest
import torch

from kernel_keys import compiled_keys, misaligned
from kv_paging import NewTokens, PagePool, Placement, Tiers, TokenWrite, fit, triton_kernels
from kv_policy import PageLayout, RunningMean
from kv_policy.key_codes import code_bytes
from triton_cases import form

# Sequences, tokens of each and columns of the tables, with 1 and multiples of 16.
SIZES = [(1, 20, 1), (3, 64, 17), (16, 33, 16)]
HEADS = 2
TOKENS = 16


def launch(B: int, count: int, columns: int, dim: int) -> None:
    """Launch every kernel for a batch, over memory of any contents."""
    what = [form("8", "4", dim, dim), form("2", "1", dim, dim)]
    first, last = fit(what, TOKENS, True, True)
    pool = PagePool(first.nbytes, 64, kernels="torch")
    both = Tiers(pool, [first, last], 1, B, HEADS)
    for store in both.stores:
        store.widen(columns)
    table_rows = B * HEADS
    every = misaligned(torch.arange(table_rows))
    whole = both.stores[0].whole()
    for length in (count, 1):
        vector = torch.zeros(table_rows, length, dim, dtype=torch.bfloat16)
        score, place = torch.zeros(table_rows, length), torch.zeros(table_rows, length).int()
        keep = torch.ones(table_rows, length).bool()
        given = vector, vector, misaligned(score), misaligned(place)
        triton_kernels.write(whole, TokenWrite(every, every, keep, *given))
    bare = PageLayout.sized(what[0], TOKENS)
    memory = torch.zeros(4, bare.nbytes, dtype=torch.uint8)
    triton_kernels.place(memory, bare, every, every, vector[:, :1], vector[:, :1])
    stay = misaligned(torch.ones(table_rows, count).bool())
    triton_kernels.compact(whole, every, stay)
    triton_kernels.copy_pages(pool.padded, every, every)
    triton_kernels.read(whole, every, count, frozenset({"keys", "values"}))
    score = misaligned(torch.zeros(table_rows, count))
    triton_kernels.rescore(whole, every, score)
    triton_kernels.accumulate(whole, every, every, score, score.long(), RunningMean(count))
    triton_kernels.weakest(whole, every, count, every)
    bounds = misaligned(torch.zeros(table_rows, columns, 2 * dim, dtype=torch.bfloat16))
    triton_kernels.bound(whole, misaligned(torch.zeros(table_rows).long()), bounds, columns)
    codes = torch.zeros(table_rows, columns, code_bytes(dim, TOKENS), dtype=torch.uint8)
    triton_kernels.bound(whole, misaligned(torch.zeros(table_rows).long()), codes, columns)
    tier = misaligned(torch.zeros(table_rows, dtype=torch.uint8))
    new = NewTokens(vector[:, 0], vector[:, 0], score[:, 0], place[:, 0])
    work = both.work(Placement(tier, tier, tier + 1), torch.zeros(2, table_rows).long(), new)
    triton_kernels.step(pool, [work])


@pytest.mark.parametrize("dim", [128, 40])
def test_every_kernel(dim: int) -> None:
    with compiled_keys() as keys:
        for B, count, columns in SIZES:
            launch(B, count, columns, dim)
    found = {name: len(each) for name, each in keys.items()}
    assert len(found) == 14
    # Tokens of a prompt are written by one kernel, and those of a step by another.
    assert {name: count for name, count in found.items() if count > 1} == {"write_kernel": 2}
