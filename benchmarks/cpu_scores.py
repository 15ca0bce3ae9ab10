"""What it costs to observe the attention of a prompt: native code and torch, over the pass itself.

A pass is causal attention of one layer over a prompt of random numbers, by torch's fused kernel.
What is observed of it is the last 64 queries, as SnapKV does, or the sums over all of them, as H2O
does: by torch and by native code, each in a pass of its own, and by native attention that sums
with the pass (`added`), whose cost is over the same without sums. Heads are those of SmolLM2, and a
quarter of those of Llama-3.1-8B: they do not depend on each other, so a ratio is that of a whole
layer. All ways run in this process, turn by turn, and a ratio is the median over the turns; seconds
are processor time of one thread.
"""

import argparse
from collections.abc import Iterator

import _result
import torch
from _timing import Work, timed
from rich.console import Console

from kv_attention import AttentionInputs, DenseTokens
from kv_attention.torch_backend import attention_mass, forward
from kv_cpu import chosen
from kv_cpu.attention_mass import observe_all
from kv_cpu.prompt import attend_and_sum, attend_to_all
from kv_policy import Observe

CONSOLE = Console(stderr=True)
SHAPES = {"llama": (2, 4, 128), "smollm2": (3, 3, 64)}  # KV heads, group, dimensions
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
WATCHED = {"last": Observe(64), "all": Observe(None)}
WAYS = tuple(f"{name}, {by}" for name in WATCHED for by in ("torch", "native"))
ADDED, NATIVE, SUMS = "all, added", "native pass", "native pass with sums"
Row = dict[str, object]


def ways(shape: tuple[int, int, int], length: int, dtype: torch.dtype) -> dict[str, Work]:
    """The pass, and each observation of it in torch and in native code."""
    heads, group, dim = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, n * length, dim, generator=generator).to(dtype) for n in (group, 1, 1)
    )
    q, position = q.view(1, heads, group, length, dim), torch.arange(length)[None]
    dense = [DenseTokens(k, v, position, full=True)]

    inputs = AttentionInputs(q, position, [], dense, [], dim, dim**-0.5)

    def attend() -> object:
        return forward(inputs)

    done = forward(inputs)
    found: dict[str, Work] = {"pass": attend}
    found[NATIVE] = lambda: attend_to_all(inputs)
    found[SUMS] = lambda: attend_and_sum(inputs, WATCHED["all"])
    for name, what in WATCHED.items():
        found[f"{name}, torch"] = lambda what=what: attention_mass(done, what)
        found[f"{name}, native"] = lambda what=what: observe_all(done, [what])
    return found


def rows(length: int, rounds: int) -> Iterator[Row]:
    """Time both models in both dtypes."""
    for model, shape in SHAPES.items():
        for name, dtype in DTYPES.items():
            turns = timed(ways(shape, length, dtype), rounds)
            yield {
                "model": model,
                "heads": shape[0],
                "group": shape[1],
                "dim": shape[2],
                "dtype": name,
                "tokens": length,
                "rounds": rounds,
                "pass_s": turns.median("pass"),
                "native_pass_s": turns.median(NATIVE),
                **{way: turns.quartiles((way,), ("pass",)) for way in WAYS},
                ADDED: [x - 1 for x in turns.quartiles((SUMS,), (NATIVE,))],
            }


def medians(row: Row) -> dict[str, float]:
    """What each way costs over the pass, of its quartiles."""
    found: dict[str, float] = {}
    for way in (*WAYS, ADDED):
        quartiles = row[way]
        assert isinstance(quartiles, list)
        found[way] = quartiles[1]
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    CONSOLE.print(f"instruction set {chosen()}")
    found: list[Row] = []
    torch.set_num_threads(1)
    sizes = [(200, 2)] if quick else [(2048, 5), (8192, 3)]
    for length, rounds in sizes:
        for row in rows(length, rounds):
            found.append({"isa": chosen(), **row})
            CONSOLE.print(found[-1])
    summary: dict[str, float] = {}
    for row in found:
        if row["tokens"] == sizes[-1][0]:
            for way in (*WAYS, ADDED):
                name = "_".join((*way.split(", "), str(row["model"]), str(row["dtype"])))
                summary[name] = medians(row)[way]
    for name, value in summary.items():
        print(f"{name:30} {value:.4f}")
    _result.write("cpu_scores", summary, found, quick=quick)


if __name__ == "__main__":
    main()
