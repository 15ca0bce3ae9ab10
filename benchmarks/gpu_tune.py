# environment: triton
"""Finds the sizes of tiles that suit a GPU, and writes them where the kernels read them.

Needs torch and triton, and none of our packages installed. Each kernel is tried with every size of
its tile, count of warps and stages of a loop, over bfloat16 and quantized pages at the shapes of
the benchmark `gpu`; what does not fit the card is left out. All sizes of one kernel and one kind of
tokens take turns, and the fastest by its median is kept. Programs of a decode step are tried last,
with the tiles that were found.

`--out FILE` writes the whole table with this card's part replaced; by default that is the file that
the kernels read.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import _bare
import torch
from gpu import DIM, FORMATS, HEADS, QUICK, SHAPES, Clock, stored
from triton.runtime.errors import TritonError

from kv_attention import DenseTokens, attend
from kv_attention.gpu import tuning
from kv_policy import Observe, PagedTokens
from kv_policy.files import write_whole

TABLE = _bare.ROOT / "packages/kv-attention/src/kv_attention/gpu/tuned.json"
TOKENS = {"prompt": 8192, "attention_mass": 8192}
QUICK_TOKENS = {"prompt": 32, "attention_mass": 32}
ROUNDS = 7
CHOICES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "decode": {"block": (16, 32, 64, 128), "warps": (2, 4, 8), "stages": (1, 2, 3, 4)},
    "prompt": {"block": (32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3), "queries": (32, 64)},
    "attention_mass": {
        "block": (32, 64, 128),
        "warps": (4, 8),
        "stages": (1, 2),
        "queries": (32, 64),
    },
}
PROGRAMS = (1, 2, 3, 4, 6)
Sizes = dict[str, int]
Pass = Callable[[], object]


@contextmanager
def using(table: dict[str, Any]) -> Iterator[None]:
    """Let kernels read another table; what was compiled stays compiled."""
    with patch.object(tuning, "tuned", lambda: table):
        tuning.machine_of.cache_clear()
        try:
            yield
        finally:
            tuning.machine_of.cache_clear()


def changed(table: dict[str, Any], where: tuple[str, ...], value: object) -> dict[str, Any]:
    """Give a copy of a table with a value in it."""
    copy = deepcopy(table)
    at = copy
    for name in where[:-1]:
        at = at.setdefault(name, {})
    at[where[-1]] = value
    return copy


def choices(kernel: str, *, quick: bool) -> list[Sizes]:
    """Every combination; the first and the last in a quick run."""
    offered = CHOICES[kernel]
    found = [dict(zip(offered, sizes, strict=True)) for sizes in product(*offered.values())]
    return [found[0], found[-1]] if quick else found


def kinds(device: str, *, quick: bool) -> Iterator[tuple[str, str, Pass]]:
    """Each kernel over each kind of tokens, with a pass of it; all that it holds is freed after."""
    batch, tokens = next(iter((QUICK if quick else SHAPES).values()))
    q = torch.randn(batch, HEADS, 4, 1, DIM, device=device, dtype=torch.bfloat16)
    last = torch.full((batch, 1), 2**30, device=device)
    length = torch.full((batch, HEADS), tokens, device=device)
    for name, parts in FORMATS.items():
        if len(parts) > 1:
            continue  # a step over two tiers is two passes
        pages = stored(parts[0][0], length, tokens, device)

        def decode(pages: PagedTokens = pages) -> object:
            return attend(q, last, [pages], [], DIM**-0.5, Observe(0), backend="triton")

        yield "decode", kind_of(pages, name), decode
    for kernel, count in (QUICK_TOKENS if quick else TOKENS).items():
        query = torch.randn(1, HEADS, 4, count, DIM, device=device, dtype=torch.bfloat16)
        key = torch.randn(1, HEADS, count, DIM, device=device, dtype=torch.bfloat16)
        place = torch.arange(count, device=device)[None]
        fresh = [DenseTokens(key, key, place, full=True)]
        what = Observe(0) if kernel == "prompt" else Observe(None)

        def prompt(
            query: torch.Tensor = query,
            place: torch.Tensor = place,
            fresh: list[DenseTokens] = fresh,
            what: Observe = what,
        ) -> object:
            return attend(query, place, [], fresh, DIM**-0.5, what, backend="triton")

        yield kernel, f"dense-plain-plain-{DIM}", prompt


def kind_of(pages: PagedTokens, name: str) -> str:
    """The class under which the kernels look for sizes."""
    bits = {"bf16": ("plain", "plain"), "k8v4": ("8", "4"), "k4v2": ("4", "2")}[name]
    return f"pages-{bits[0]}-{bits[1]}-{max(pages.layout.format.key.dim, DIM)}"


def fits(table: dict[str, Any], once: Pass) -> bool:
    """Whether a pass compiles and runs on this card."""
    with using(table):
        try:
            once()
        except TritonError:  # too large for the card, or for its assembler
            return False
    return True


def fastest(
    clock: Clock, tables: Mapping[str, dict[str, Any]], once: Pass
) -> tuple[str, dict[str, float]]:
    """The table under which a pass takes least, and the seconds under each."""

    def under(table: dict[str, Any]) -> Pass:
        def work() -> object:
            with using(table):
                return once()

        return work

    tried = {name: under(table) for name, table in tables.items() if fits(table, once)}
    seconds = clock.turns(tried, ROUNDS)
    return min(seconds, key=seconds.__getitem__), seconds


def tune(device: str, architecture: str, *, quick: bool) -> dict[str, Any]:
    """Try everything, and give the whole table with this architecture's part replaced."""
    clock = Clock(device)
    table = deepcopy(tuning.tuned())
    table["tiles"].pop(architecture, None)
    for kernel, kind, once in kinds(device, quick=quick):
        where = ("tiles", architecture, kernel, kind)
        sizes = {str(each): each for each in choices(kernel, quick=quick)}
        tables = {name: changed(table, where, each) for name, each in sizes.items()}
        name, seconds = fastest(clock, tables, once)
        table = tables[name]
        print(f"{kernel} {kind}: {name}, {1e6 * seconds[name]:.0f} us", flush=True)
        slowest = max(seconds, key=seconds.__getitem__)
        print(
            f"  slowest of {len(seconds)}: {slowest}, {1e6 * seconds[slowest]:.0f} us", flush=True
        )
        if kernel == "decode" and device != "cpu":
            each = {str(n): changed(table, (*where, "programs"), n) for n in PROGRAMS}
            best, _ = fastest(clock, each, once)
            print(f"  programs for each multiprocessor: {best}", flush=True)
            table = each[best]
    return table


def main() -> None:
    """Tune for the card that is here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, and no file")
    parser.add_argument("--out", type=Path, default=TABLE, help="where the table goes")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not (given.quick and os.environ.get("TRITON_INTERPRET") == "1"):
        sys.exit("there is no GPU; --quick with TRITON_INTERPRET=1 tries the script without one")
    torch.manual_seed(0)
    machine = tuning.machine_of(torch.device(device))
    table = tune(device, machine.architecture, quick=given.quick)
    if given.quick:
        print("a quick run, nothing is written")
        return
    write_whole(given.out, f"{json.dumps(table, indent=2)}\n".encode())
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
