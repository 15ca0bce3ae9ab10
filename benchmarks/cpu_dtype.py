"""SmolLM2 on a CPU in bfloat16, as it is stored, and in float32: a prompt, and steps after it.

All take turns in one process. Seconds are wall time on all cores; a ratio is the median over rounds
of the seconds in bfloat16 over those in float32, by the same cache. What it depends on is whether
the processor multiplies bfloat16: torch's word for its instructions is in every row.
"""

import argparse
import time
from functools import partial

import _result
import torch
from _timing import Work, timed
from rich.console import Console
from torch import Tensor

from kv_eval.evaluate.decode import read
from kv_eval.tasks import default_text
from kv_transformers.from_text import held, make_cache
from kv_transformers.models import LoadedModel, load_model

DTYPES = ("bfloat16", "float32")
SPECS = ("full", "k8v4")
CONSOLE = Console(stderr=True)
Row = dict[str, object]


def prompt_of(loaded: LoadedModel, tokens: int) -> Tensor:
    """The first tokens of the default text (1, L)."""
    ids = loaded.tokenizer.encode(default_text().body[: tokens * 8], add_special_tokens=False)
    return torch.tensor([ids[:tokens]])


def passes(loaded: LoadedModel, spec: str, prompt: Tensor) -> tuple[Work, Work, int]:
    """Reading a prompt into a fresh cache, a step over one that holds it, and what that holds."""
    model, there = loaded.model, make_cache(loaded.model, spec)
    read(model, there, prompt)
    token = prompt[:, -1:]

    def begin() -> object:
        return read(model, make_cache(model, spec), prompt)

    return begin, partial(read, model, there, token), held(there).kv_bytes


def main() -> None:
    """Time everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    tokens, rounds, steps = (200, 2, 2) if quick else (2000, 5, 8)
    prompts: dict[str, Work] = {}
    decodes: dict[str, Work] = {}
    size: dict[str, int] = {}
    for dtype in DTYPES:
        loaded = load_model(dtype=dtype, progress=CONSOLE.print)
        for spec in SPECS:
            name = f"{spec}_{dtype}"
            prompts[name], decodes[name], size[name] = passes(
                loaded, spec, prompt_of(loaded, tokens)
            )
    parts = {
        "prompt": timed(prompts, rounds, clock=time.perf_counter),
        "decode": timed(decodes, rounds, steps, clock=time.perf_counter),
    }
    rows: list[Row] = []
    summary: dict[str, float] = {}
    instructions = torch.backends.cpu.get_cpu_capability()
    for part, turns in parts.items():
        for spec in SPECS:
            stored, wide = (f"{spec}_{dtype}" for dtype in DTYPES)
            low, ratio, high = turns.quartiles((stored,), (wide,))
            summary[f"{part}_{spec}_float32_speed"] = ratio
            for dtype in DTYPES:
                name = f"{spec}_{dtype}"
                rows.append(
                    {
                        **{"part": part, "cache": spec, "dtype": dtype, "tokens": tokens},
                        **{"seconds": turns.median(name), "kv_bytes": size[name]},
                        **{"instructions": instructions, "threads": torch.get_num_threads()},
                        **{"ratio_quartiles": [low, high]},
                    }
                )
            CONSOLE.print(f"{part:7} {spec:5} x{ratio:.2f} in float32")
    _result.write("cpu_dtype", summary, rows, quick=quick)


if __name__ == "__main__":
    main()
