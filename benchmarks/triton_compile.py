# environment: triton
"""Every kernel for GPUs, compiled ahead of time for sm_80 and sm_90; no GPU is needed.

Kernels are compiled as the first call would compile them: what they are launched with is recorded,
and nothing is launched. Shapes are those of Llama-3.1-8B (32 query heads over 8 KV heads of 128
dimensions, queries in bfloat16) with pages of 16 tokens; a few are of fewer dimensions, as under a
basis, or of queries in float32. A kernel that spills registers, or needs more shared memory than a
program may have, fails the run. Some are of large heads, and of models with sinks and a bound of
the logits.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what triton does unless told otherwise
os.environ.pop("TRITON_INTERPRET", None)  # what it would interpret it could not compile

import _result
import torch
from _compiled import Launch, compiled, launches_of
from rich.console import Console
from rich.progress import track

from kv_attention.gpu.arguments import PartArguments, dense_part, paged_part
from kv_attention.gpu.attention_mass import mass_of_pass, mass_of_step
from kv_attention.gpu.decode import decode
from kv_attention.gpu.prefill import attend_to_all
from kv_attention.gpu.selecting import select
from kv_attention.gpu.tuning import Machine
from kv_attention.page_bounds import PageBounds
from kv_attention.tokens import DenseTokens
from kv_evict import gate_gpu
from kv_paging import NewTokens, PagePool, Placement, Tiers, TokenWrite, fit, triton_kernels
from kv_policy import (
    Budget,
    CacheShape,
    Observe,
    PagedTokens,
    PageLayout,
    PageReading,
    RunningMean,
    RunningSum,
    TokenFormat,
    parse,
)
from kv_policy.key_codes import code_bytes

BATCH, HEADS, GROUP, DIM, TOKENS, LENGTH = 4, 8, 4, 128, 16, 2048
SAME = (DIM, DIM)  # dimensions of keys and of values
RANKS = (40, 96)  # what a basis may leave of them
LARGE = (512, 512)
LATENT = (576, 512)  # of latents and rotated dimensions
SOFTMAX = (30.0, torch.zeros(HEADS, GROUP))  # a bound of the logits, and sinks
PLAIN_SOFTMAX = (None, None)
BITS = (8, 4, 2, 1)
PLAIN = ("bf16", "fp16", "fp32")
GROUPED = "k4v2:group=32"  # vectors with several scales are read by code of their own
FORMATS = (*PLAIN, *(f"k{key}v{value}" for key in BITS for value in BITS), GROUPED)
# Each size of keys and of values once.
PAGED = (*PLAIN, "k8v4", "k4v2", "k2v1", "k1v8", GROUPED)
Wanted = dict[int, tuple[str, ...]]  # formats by architecture
EVERYTHING: Wanted = {80: FORMATS, 90: FORMATS}
QUICK: Wanted = {80: ("k4v2",), 90: ("k8v4", "bf16", GROUPED)}
WATCHED = {
    "last": Observe(last=32),
    "all": Observe(None, "max", power=2, skip=64),
}
CONSOLE = Console(stderr=True)
Row = dict[str, object]


def format_of(name: str, dims: tuple[int, int] = SAME) -> TokenFormat:
    """The codecs of a format for keys and values of so many dimensions."""
    formats = parse(name).formats
    assert formats is not None  # it is one
    (form,) = formats.bind(CacheShape(1, HEADS, GROUP, *dims))
    return form


def pages_of(name: str, dims: tuple[int, int] = SAME) -> PagedTokens:
    """Pages whose bytes nobody reads."""
    layout = PageLayout.sized(format_of(name, dims), TOKENS)
    return PagedTokens(
        torch.empty(LENGTH, layout.nbytes, dtype=torch.uint8),
        torch.zeros(BATCH, HEADS, LENGTH // TOKENS, dtype=torch.int32),
        torch.zeros(BATCH, HEADS, dtype=torch.int32),
        layout,
        longest=LENGTH,
    )


def fresh(
    length: int, dims: tuple[int, int] = SAME, dtype: torch.dtype = torch.bfloat16
) -> PartArguments:
    """Plain tokens."""
    key, value = (torch.empty(BATCH, HEADS, length, dim, dtype=dtype) for dim in dims)
    place = torch.zeros(BATCH, length, dtype=torch.long)
    return dense_part(DenseTokens(key, value, place, full=True))


def queries(
    part: PartArguments, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries that fit the keys of a part, and their positions."""
    q = torch.empty(BATCH, HEADS, GROUP, length, part.key[1], dtype=dtype)
    return q, torch.zeros(BATCH, length, dtype=torch.long)


def steps(
    part: PartArguments,
    machine: Machine,
    dtype: torch.dtype = torch.bfloat16,
    softmax: tuple[float | None, torch.Tensor | None] = PLAIN_SOFTMAX,
) -> None:
    """A decode step that nobody observes, and one that somebody does."""
    q, position = queries(part, 1, dtype)
    decode(q, position, [part], part.value[1], 0.1, machine, *softmax)
    own = fresh(1, (part.key[1], part.value[1]), dtype)
    decode(q, position, [part, own], part.value[1], 0.1, machine, *softmax)
    decode(q, position, [part, own], part.value[1], 0.1, machine, *softmax, watched=True)
    done = decode(q, position, [part], part.value[1], 0.1, machine, *softmax, watched=True)
    place = torch.zeros(BATCH, 1, part.width, dtype=torch.long)
    for what in WATCHED.values():
        mass_of_step(done, position, [part], [place], what)


def prompts(
    part: PartArguments,
    machine: Machine,
    dtype: torch.dtype = torch.bfloat16,
    softmax: tuple[float | None, torch.Tensor | None] = PLAIN_SOFTMAX,
) -> None:
    """A chunk of a prompt over this part and itself, and what is observed of this part."""
    q, position = queries(part, 512, dtype)
    itself = fresh(512, (part.key[1], part.value[1]), dtype)
    found = attend_to_all(q, position, [part, itself], part.value[1], 0.1, machine, *softmax)
    place = torch.zeros(BATCH, 1, part.width, dtype=torch.long)
    for what in WATCHED.values():
        rows = slice(None) if what.last is None else slice(0, what.last)
        lse = found.lse[..., rows]
        given = (q[..., rows, :], position[:, rows], lse, found.out, [part], [place])
        mass_of_pass(*given, 0.1, machine, what, softmax[0])


def pages(name: str) -> None:
    """Everything that touches the bytes of pages; a token that leaves goes to 2 bits and 1."""
    first, last = fit([format_of(name), format_of("k2v1")], TOKENS, True, True)
    table_rows = BATCH * HEADS
    pool = PagePool(first.nbytes, 4, kernels="torch")
    both = Tiers(pool, [first, last], 1, BATCH, HEADS)
    whole = both.stores[0].whole()
    every = torch.arange(table_rows)
    vector = torch.empty(table_rows, 2 * TOKENS, DIM, dtype=torch.bfloat16)
    score, place = torch.empty(vector.shape[:2]), torch.zeros(vector.shape[:2], dtype=torch.int32)
    keep = torch.ones(vector.shape[:2], dtype=torch.bool)
    triton_kernels.write(whole, TokenWrite(every, every, keep, vector, vector, score, place))
    bare = PageLayout.sized(format_of(name), TOKENS)
    memory = torch.empty(4, bare.nbytes, dtype=torch.uint8)
    triton_kernels.place(memory, bare, every, every, vector[:, :1], vector[:, :1])
    triton_kernels.compact(whole, every, keep)
    triton_kernels.copy_pages(pool.padded, every, every)
    triton_kernels.read(whole, every, 2 * TOKENS, frozenset({"keys", "values"}))
    triton_kernels.rescore(whole, every, score)
    before = torch.zeros_like(every)
    for running in (RunningMean(), RunningSum()):
        triton_kernels.accumulate(whole, every, before, score, score.long(), running)
    triton_kernels.weakest(whole, every, 2 * TOKENS, every)
    for lead in ((table_rows, 2), (len(pool.padded),)):  # by column, and by page
        bounds = torch.empty(*lead, 2 * DIM, dtype=torch.bfloat16)
        triton_kernels.bound(whole, before, bounds, 1)
        codes = torch.empty(*lead, code_bytes(DIM, TOKENS), dtype=torch.uint8)
        triton_kernels.bound(whole, before, codes, 1)
    tier = torch.zeros(table_rows, dtype=torch.uint8)
    new = NewTokens(vector[:, 0], vector[:, 0], score[:, 0], place[:, 0])
    moved = both.work(
        Placement(tier, tier, tier + 1), torch.zeros(2, table_rows, dtype=torch.long), new
    )
    triton_kernels.step(pool, [moved])


def reading(group: int, dim: int, budget: Budget, dtype: torch.dtype) -> None:
    """The selection of the pages that a decode step reads."""
    q, columns = torch.empty(BATCH, HEADS, group, dim, dtype=dtype), LENGTH // TOKENS
    count = torch.zeros(BATCH, HEADS, dtype=torch.long)
    read = PageReading(budget, 4, 16)
    for lead in ((BATCH, HEADS, columns), (BATCH * HEADS * columns,)):  # by column, and by page
        both = torch.empty(*lead, 2 * dim, dtype=torch.bfloat16)
        codes = torch.empty(*lead, code_bytes(dim, TOKENS), dtype=torch.uint8)
        for each in (both, codes):
            bounds = PageBounds(each, count, missing=0)
            select(q, pages_of("k8v4", (dim, dim)), bounds, read, columns // 4)


def gate(layers: int, units: int) -> None:
    """The scores of a gate, for rotations of each layer or of all."""
    vectors = [torch.empty(BATCH, HEADS, 512, DIM, dtype=torch.bfloat16) for _ in "kv"]
    place = torch.zeros(BATCH, 1, 512, dtype=torch.long).expand(BATCH, HEADS, 512)
    turn = torch.empty(layers, DIM)
    weights = [torch.empty(32, HEADS, 3 * DIM + 5, *rest) for rest in ((), (units,))]
    gate_gpu.gate(
        *vectors,
        place,
        torch.zeros(BATCH, dtype=torch.long),
        (turn, turn.long(), turn),
        (*weights, torch.empty(32, HEADS, units)),
        0,
    )


def work(
    names: tuple[str, ...], machine: Machine, shapes: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Everything that launches kernels, by the format it is about, `shapes`: of others too."""
    for name in names:
        part = paged_part(pages_of(name), watched=True)
        yield name, partial(steps, part, machine)
        yield name, partial(prompts, part, machine)
        if name in PAGED:
            yield name, partial(pages, name)
    if not shapes:
        return
    k8v4, ranks = (paged_part(pages_of("k8v4", dims), watched=True) for dims in (SAME, RANKS))
    bf16, single = torch.bfloat16, torch.float32
    for name, step, prompt, dtype in (
        ("plain", fresh(64), fresh(512), bf16),
        ("k8v4, ranks", ranks, ranks, bf16),
        ("k8v4, queries in float32", k8v4, k8v4, single),
        ("plain float32", fresh(64, dtype=single), fresh(512, dtype=single), single),
    ):
        yield name, partial(steps, step, machine, dtype)
        yield name, partial(prompts, prompt, machine, dtype)
    yield "k8v4, sinks and a bound", partial(steps, k8v4, machine, bf16, SOFTMAX)
    yield "k8v4, sinks and a bound", partial(prompts, k8v4, machine, bf16, SOFTMAX)
    for dims in (LARGE, LATENT):
        name = "{} and {} dimensions".format(*dims)
        for form, part in (
            ("plain", fresh(512, dims)),
            ("k8v4", paged_part(pages_of("k8v4", dims), watched=True)),
        ):
            yield f"{form}, {name}", partial(steps, part, machine)
            yield f"{form}, {name}", partial(prompts, part, machine)
    share, tokens = Budget(25, "percent"), Budget(1024)
    for group, dim, budget, dtype in (
        (GROUP, DIM, share, bf16),
        (7, RANKS[0], tokens, single),
        (128, LATENT[0], share, bf16),
    ):
        name = f"a reading of {budget}, {group} queries of {dim} dimensions"
        yield name, partial(reading, group, dim, budget, dtype)
    for layers, units in ((1, 16), (32, 64)):
        yield f"gate of {units} units", partial(gate, layers, units)


def launches(
    names: tuple[str, ...], architecture: int, shapes: bool
) -> Iterator[tuple[str, Launch]]:
    """Every launch once: kernels that do not depend on a format are named with the first."""
    machine = Machine(f"sm_{architecture}", 132, True)
    known = set()
    for name, doing in work(names, machine, shapes):
        for launch in launches_of(doing):
            key = (launch.name, *launch.kinds)
            if key not in known:
                known.add(key)
                yield name, launch


def measure(wanted: Wanted, other_shapes: frozenset[int]) -> list[Row]:
    """Compile everything, and other shapes for these architectures."""
    every = [
        (arch, *each)
        for arch, names in wanted.items()
        for each in launches(names, arch, arch in other_shapes)
    ]
    return [
        {
            "kernel": launch.name,
            "format": name,
            "architecture": f"sm_{architecture}",
            "warps": launch.named.get("num_warps", 4),
            "block": launch.named.get("BLOCK", 0),
            **compiled(launch, architecture),
        }
        for architecture, name, launch in track(every, "compiling", console=CONSOLE)
    ]


def main() -> None:
    """Compile, write the result, and fail where something does not fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few formats, other shapes once, and no file"
    )
    quick = parser.parse_args().quick
    rows = measure(QUICK, frozenset({90})) if quick else measure(EVERYTHING, frozenset(EVERYTHING))
    spills = [row for row in rows if row["spills"]]
    large = [row for row in rows if int(str(row["shared"])) > int(str(row["shared_most"]))]
    summary = {
        "kernels": float(len(rows)),
        "spills": float(len(spills)),
        "over_shared": float(len(large)),
        "most_registers": float(max(int(str(row["registers"])) for row in rows)),
        "most_shared": float(max(int(str(row["shared"])) for row in rows)),
    }
    for name, value in summary.items():
        print(f"{name:24} {value:.0f}")
    _result.write("triton_compile", summary, rows, quick=quick)
    for row in [*spills, *large]:
        print(f"does not fit: {row}")
    if spills or large:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
