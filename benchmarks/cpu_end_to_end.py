"""Decoding and reading prompts with SmolLM2 on a CPU: compressed caches beside transformers' own.

Rows of kind `decode` are steps of one token a sequence over caches that hold the same text, all
caches taking turns; every sequence of a batch has read it, so that none shares pages with another.
Rows of kind `prompt` are passes over a prompt stored as k8v4, of which attention observes nothing,
or what a policy would ask for. Seconds are wall time on all cores; a ratio is the median over
rounds.
"""

import argparse
import time
from itertools import product
from unittest.mock import patch

import _result
import torch
from _native import expect_native
from _timing import Turns, timed
from jaxtyping import Int
from rich.console import Console
from torch import Tensor

from kv_eval.evaluate.decode import read
from kv_eval.tasks import default_text
from kv_policy import Observe, complete, parse
from kv_runtime.retain.keep_all import KeepAll
from kv_transformers.from_text import held, make_cache
from kv_transformers.models import LoadedModel, load_model

SPECS = ("full", "raw", "k8v4", "k4v2", "leankv:t_high=0.2", "kv-compress:rate=4")
WATCHED = ("kv-compress:rate=4", "leankv:t_high=0.2", "h2o:budget=1024")
UNSEEN = "unseen"  # a pass that counts for nothing
CONSOLE = Console(stderr=True)
Row = dict[str, object]


class Decoding:
    """A cache that holds a text, and goes on from it greedily."""

    def __init__(
        self, loaded: LoadedModel, spec: str, prompt: Int[Tensor, "1 L"], batch: int
    ) -> None:
        """Read the prompt for every sequence of the batch."""
        self.model, self.cache = loaded.model, make_cache(loaded.model, spec)
        logits = read(loaded.model, self.cache, prompt.expand(batch, -1))
        self.bytes = held(self.cache).kv_bytes
        self.token = logits.argmax(-1)[:, None]

    def step(self) -> None:
        """Decode a token of each sequence."""
        self.token = read(self.model, self.cache, self.token).argmax(-1)[:, None]


def text(loaded: LoadedModel, tokens: int) -> Int[Tensor, "1 L"]:
    """The first tokens of the default text."""
    ids = loaded.tokenizer.encode(default_text().body[: tokens * 8], add_special_tokens=False)
    return torch.tensor([ids[:tokens]])


def decoded(loaded: LoadedModel, batch: int, tokens: int, rounds: int) -> list[Row]:
    """Time a step over every cache; the context is full when the last one ends."""
    prompt = text(loaded, tokens - rounds - 2)
    caches = {spec: Decoding(loaded, spec, prompt, batch) for spec in SPECS}
    turns = timed({s: c.step for s, c in caches.items()}, rounds, clock=time.perf_counter)
    return [
        {
            "kind": "decode",
            "spec": spec,
            "batch": batch,
            "tokens": tokens,
            "kv_bytes": cache.bytes,
            "seconds": turns.median(spec),
            "tokens_per_s": batch / turns.median(spec),
            **against(turns, spec, "full"),
        }
        for spec, cache in caches.items()
    ]


def read_prompts(loaded: LoadedModel, tokens: int, rounds: int) -> list[Row]:
    """Time passes over a prompt that observe what policies ask for, or nothing."""
    prompt = text(loaded, tokens)
    watched = {"nothing": Observe()}
    for spec in WATCHED:
        selector = parse(spec).selector
        assert selector is not None
        watched[spec] = complete(selector).observe

    def reading(observe: Observe) -> None:
        with patch.object(KeepAll, "observe_prompt", observe):
            read(loaded.model, make_cache(loaded.model, "k8v4"), prompt)

    # A pass after that of another cache takes longer, whatever it observes: its memory is new.
    work = {UNSEEN: lambda: reading(Observe())}
    work |= {name: lambda o=observe: reading(o) for name, observe in watched.items()}
    work["full"] = lambda: read(loaded.model, make_cache(loaded.model, "full"), prompt)
    turns = timed(work, rounds, clock=time.perf_counter)
    return [
        {
            "kind": "prompt",
            "observes": name,
            "observe": str(watched.get(name, "transformers' own cache")),
            "batch": 1,
            "tokens": tokens,
            "seconds": turns.median(name),
            **against(turns, "nothing", name),
        }
        for name in work
        if name != UNSEEN
    ]


def against(turns: Turns, over: str, under: str) -> Row:
    """How much longer, or less long, than another."""
    low, ratio, high = turns.quartiles((under,), (over,))
    return {"ratio": ratio, "ratio_quartiles": [low, high]}


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    arguments = parser.parse_args()
    expect_native()
    sizes, prompts = list(product((1, 8), (4096, 8192))), (8192,)
    rounds, times = 15, 3
    if arguments.quick:
        sizes, prompts, rounds, times = [(2, 512)], (512,), 3, 2
    loaded = load_model(progress=CONSOLE.print)
    rows: list[Row] = []
    with torch.inference_mode():
        for batch, tokens in sizes:
            rows += decoded(loaded, batch, tokens, rounds)
            CONSOLE.print(rows[-len(SPECS) :])
        for tokens in prompts:
            rows += read_prompts(loaded, tokens, times)
            CONSOLE.print(rows[-len(WATCHED) - 2 :])
    summary = figures(rows)
    for name, value in summary.items():
        print(f"{name:36} {value:.4f}")
    _result.write("cpu_end_to_end", summary, rows, quick=arguments.quick)


def figures(rows: list[Row]) -> dict[str, float]:
    """What a document may quote."""
    found = {}
    for row in rows:
        ratio, size = float(str(row["ratio"])), f"{int(str(row['tokens'])) // 1024}k"
        if row["kind"] == "decode" and row["spec"] != "full":
            name = str(row["spec"]).partition(":")[0].replace("-", "_")
            found[f"decode_{name}_vs_full_{size}_b{row['batch']}"] = ratio
    long = {str(r["observes"]): float(str(r["ratio"])) for r in rows[-len(WATCHED) - 2 :]}
    found["prefill_scores_overhead"] = long["leankv:t_high=0.2"] - 1
    found["prefill_all_scores_overhead"] = long["h2o:budget=1024"] - 1
    return found


if __name__ == "__main__":
    main()
