"""Native attention on this processor by instruction set: a decode step, and a prompt.

One layer with the heads of SmolLM2-135M, queries in bfloat16, one thread. A decode step is over
stored tokens in pages in random order; a prompt sees itself alone. Each instruction set that this
processor has is asked for by its name; `plain` and emulated tiles are for tests, and left out. A
row is the median over rounds in which all take turns; a ratio is the median over rounds of the
seconds of `avx512` over those of the instruction set. Seconds are processor time. On a processor
with AMX the result is `cpu_isa_amx`.
"""

import argparse
from functools import partial

import _result
import torch
from _cpu_tokens import Heads, random_vectors, stored
from _timing import Work, timed
from rich.console import Console

from kv_attention import AttentionInputs, DenseTokens
from kv_cpu import backend, runnable
from kv_cpu.prompt import attend_to_all

HEADS = Heads(query=9, kv=3, dim=64)
SEQUENCES, TOKENS, PROMPT = 4, 8192, 2048
FORMATS = ("raw", "k8v4", "k4v2")
BASE = "avx512"
UNTIMED = frozenset({"plain", "amx-emulated"})
CONSOLE = Console(stderr=True)
Row = dict[str, object]


def decode(spec: str, tokens: int, isas: list[str]) -> dict[str, Work]:
    """A step of one token of each sequence, by instruction set."""
    key, value = random_vectors(HEADS, SEQUENCES, tokens)
    query = torch.randn(SEQUENCES, HEADS.kv, HEADS.group, 1, HEADS.dim).to(torch.bfloat16)
    position = torch.full((SEQUENCES, 1), tokens)
    pages = [stored(HEADS.format(spec), key, value)]
    given = AttentionInputs(query, position, pages, [], [None], HEADS.dim, HEADS.dim**-0.5)
    return {isa: partial(backend.attend, given, isa=isa) for isa in isas}


def prompt(tokens: int, isas: list[str]) -> dict[str, Work]:
    """A whole prompt of one sequence, by instruction set."""
    key, value = random_vectors(HEADS, 1, tokens)
    query = torch.randn(1, HEADS.kv, HEADS.group, tokens, HEADS.dim).to(torch.bfloat16)
    place = torch.arange(tokens)[None]
    fresh = [DenseTokens(key, value, place, full=True)]
    given = AttentionInputs(query, place, [], fresh, [], HEADS.dim, HEADS.dim**-0.5)
    return {isa: partial(attend_to_all, given, isa=isa) for isa in isas}


def measured(kind: str, tokens: int, work: dict[str, Work], rounds: int) -> list[Row]:
    """Time all instruction sets over one kind of pass."""
    turns = timed(work, rounds)
    found: list[Row] = []
    for isa in work:
        low, ratio, high = turns.quartiles((BASE,), (isa,))
        row: Row = {"kind": kind, "tokens": tokens, "isa": isa, "seconds": turns.median(isa)}
        found.append(row | {"vs_avx512": ratio, "vs_avx512_quartiles": [low, high]})
        CONSOLE.print(f"{kind:12} {isa:8} {turns.median(isa):.5f} s  x{ratio:.2f}")
    return found


def main() -> None:
    """Time everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    tokens, length, rounds = (512, 256, 2) if quick else (TOKENS, PROMPT, 15)
    isas = [isa for isa in runnable() if isa not in UNTIMED]
    torch.set_num_threads(1)
    rows: list[Row] = []
    for spec in FORMATS:
        rows += measured(f"decode_{spec}", tokens, decode(spec, tokens, isas), rounds)
    rows += measured("prompt", length, prompt(length, isas), rounds)
    summary = {
        f"{row['kind']}_{str(row['isa']).replace('-', '_')}_vs_{BASE}": float(str(row["vs_avx512"]))
        for row in rows
        if row["isa"] != BASE
    }
    name = "cpu_isa_amx" if "amx" in isas else "cpu_isa"
    _result.write(name, summary, rows, quick=quick)


if __name__ == "__main__":
    main()
