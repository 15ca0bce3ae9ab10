# environment: triton
"""Every kernel for GPUs, compiled ahead of time for sm_80 and sm_90; no GPU is needed.

Kernels are compiled as the first call would compile them: what they are launched with is recorded,
and nothing is launched. Shapes are those of Llama-3.1-8B (32 query heads over 8 KV heads of 128
dimensions, queries in bfloat16) with pages of 16 tokens. A kernel that spills registers, or needs
more shared memory than a program may have, fails the run.
"""

import argparse
import os
from collections.abc import Callable, Iterator

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what triton does unless told otherwise
os.environ.pop("TRITON_INTERPRET", None)  # what it would interpret it could not compile

import _result
import torch
from _compiled import Launch, compiled, launches_of
from rich.console import Console
from rich.progress import track

from kv_attention.gpu.arguments import Part, dense_part, paged_part
from kv_attention.gpu.looking import look_back, watch
from kv_attention.gpu.prompts import attend_to_all
from kv_attention.gpu.steps import decode
from kv_attention.gpu.tuning import Machine
from kv_attention.tokens import DenseTokens
from kv_paging import PagePool, Tiers, fit, triton_kernels
from kv_paging.work import Choice, Tokens
from kv_policy import (
    CacheShape,
    Observe,
    PagedTokens,
    PageLayout,
    RunningMean,
    RunningSum,
    TokenFormat,
    load,
)

BATCH, HEADS, GROUP, DIM, TOKENS, LENGTH = 4, 8, 4, 128, 16, 2048
BITS = (8, 4, 2, 1)
FORMATS = ("bf16", "fp16", *(f"k{key}v{value}" for key in BITS for value in BITS))
PAGED = ("bf16", "fp16", "k8v4", "k4v2", "k2v1", "k1v8")  # each size of keys and of values once
Wanted = dict[int, tuple[str, ...]]  # formats by architecture
EVERYTHING: Wanted = {80: FORMATS, 90: FORMATS}
QUICK: Wanted = {80: ("k8v4",), 90: ("k8v4", "k4v2", "bf16")}
WATCHED = {
    "last": Observe(last=32),
    "all": Observe(None, "max", power=2, skip=64),
}
CONSOLE = Console(stderr=True)
Row = dict[str, object]


def format_of(name: str) -> TokenFormat:
    """The codecs of a format at this model's shape."""
    formats = load(name)().formats
    assert formats is not None  # it is one
    (form,) = formats.bind(CacheShape(1, HEADS, GROUP, DIM, DIM))
    return form


def pages_of(name: str) -> PagedTokens:
    """Pages whose bytes nobody reads."""
    layout = PageLayout.sized(format_of(name), TOKENS)
    return PagedTokens(
        torch.empty(LENGTH, layout.nbytes, dtype=torch.uint8),
        torch.zeros(BATCH, HEADS, LENGTH // TOKENS, dtype=torch.int32),
        torch.zeros(BATCH, HEADS, dtype=torch.int32),
        layout,
        longest=LENGTH,
    )


def fresh(length: int) -> Part:
    """Plain tokens."""
    key = torch.empty(BATCH, HEADS, length, DIM, dtype=torch.bfloat16)
    place = torch.zeros(BATCH, length, dtype=torch.long)
    return dense_part(DenseTokens(key, key, place, full=True), HEADS)


def queries(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and their positions."""
    q = torch.empty(BATCH, HEADS, GROUP, length, DIM, dtype=torch.bfloat16)
    return q, torch.zeros(BATCH, length, dtype=torch.long)


def steps(part: Part, machine: Machine) -> None:
    """A decode step that nobody observes, and one that somebody does."""
    q, position = queries(1)
    decode(q, position, [part], DIM, 0.1, machine)
    done = decode(q, position, [part], DIM, 0.1, machine, watched=True)
    place = torch.zeros(BATCH, 1, part.width, dtype=torch.long)
    for what in WATCHED.values():
        watch(done, position, [part], [place], what)


def prompts(part: Part, machine: Machine) -> None:
    """A chunk of a prompt over this part and itself, and what is observed of this part."""
    q, position = queries(512)
    found = attend_to_all(q, position, [part, fresh(512)], DIM, 0.1, machine)
    place = torch.zeros(BATCH, 1, part.width, dtype=torch.long)
    for what in WATCHED.values():
        rows = slice(None) if what.last is None else slice(0, what.last)
        lse = found.lse[..., rows]
        given = (q[..., rows, :], position[:, rows], lse, found.out, [part], [place])
        look_back(*given, 0.1, machine, what)


def pages(name: str) -> None:
    """Everything that touches the bytes of pages; a token that leaves goes to 2 bits and 1."""
    first, last = fit([format_of(name), format_of("k2v1")], TOKENS, True, True)
    streams = BATCH * HEADS
    pool = PagePool(first.nbytes, 4, kernels="torch")
    both = Tiers(pool, [first, last], 1, BATCH, HEADS)
    whole = both.stores[0].whole()
    every = torch.arange(streams)
    vector = torch.empty(streams, 2 * TOKENS, DIM, dtype=torch.bfloat16)
    score, place = torch.empty(vector.shape[:2]), torch.zeros(vector.shape[:2], dtype=torch.int32)
    keep = torch.ones(vector.shape[:2], dtype=torch.bool)
    triton_kernels.write(whole, every, every, keep, vector, vector, score, place)
    bare = PageLayout.sized(format_of(name), TOKENS)
    memory = torch.empty(4, bare.nbytes, dtype=torch.uint8)
    triton_kernels.place(memory, bare, every, every, vector[:, 0], vector[:, 0])
    triton_kernels.close_up(whole, every, keep)
    triton_kernels.copy_pages(pool.padded, every, every)
    triton_kernels.read(whole, every, 2 * TOKENS, frozenset({"keys", "values"}))
    triton_kernels.rescore(whole, every, score)
    before = torch.zeros_like(every)
    for running in (RunningMean(), RunningSum()):
        triton_kernels.accumulate(whole, every, before, score, score.long(), running)
    triton_kernels.weakest(whole, every, 2 * TOKENS, every)
    tier = torch.zeros(streams, dtype=torch.uint8)
    new = Tokens(vector[:, 0], vector[:, 0], score[:, 0], place[:, 0])
    moved = both.work(Choice(tier, tier, tier + 1), torch.zeros(2, streams, dtype=torch.long), new)
    triton_kernels.step(pool, [moved])


def work(names: tuple[str, ...], machine: Machine) -> Iterator[tuple[str, Callable[[], object]]]:
    """Everything that launches kernels, by the format it is about."""
    for name in names:
        part = paged_part(pages_of(name), watched=True)
        yield name, lambda part=part: steps(part, machine)
        yield name, lambda part=part: prompts(part, machine)
        if name in PAGED:
            yield name, lambda name=name: pages(name)
    yield "plain", lambda: steps(fresh(64), machine)
    yield "plain", lambda: prompts(fresh(512), machine)


def launches(names: tuple[str, ...], architecture: int) -> Iterator[tuple[str, Launch]]:
    """Every launch once: kernels that do not depend on a format are named with the first."""
    machine = Machine(f"sm_{architecture}", 3 * 132, True)
    known = set()
    for name, doing in work(names, machine):
        for launch in launches_of(doing):
            key = (launch.name, *launch.kinds)
            if key not in known:
                known.add(key)
                yield name, launch


def measure(wanted: Wanted) -> list[Row]:
    """Compile everything."""
    every = [(arch, *each) for arch, names in wanted.items() for each in launches(names, arch)]
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
    parser.add_argument("--quick", action="store_true", help="few formats, and no file")
    quick = parser.parse_args().quick
    rows = measure(QUICK if quick else EVERYTHING)
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
