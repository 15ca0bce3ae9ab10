"""Rows of this project's caches."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _asking import Reading, clock, load, run
from _native import expect_native
from _work import Work, put, rows_out, versions
from torch import Tensor

from kv_eval.evaluate.shared import read_prompt
from kv_transformers import CompressedCache
from kv_transformers.from_text import make_cache


def reading(cache: Any) -> Reading:
    """What was read, with the bytes that the cache itself says it holds."""
    ours = isinstance(cache, CompressedCache)
    return Reading(cache, counted=cache.memory().total_bytes if ours else None)


def main() -> None:
    """Print the rows that are asked for."""
    out, work = rows_out(), Work.read(Path(sys.argv[1]))
    expect_native()
    put(out, versions(("kv-serve", "torch", "transformers")))
    model = load(work.model)

    def read(ways: Sequence[str], prompt: Tensor) -> Mapping[str, Reading | Exception]:
        caches = {way: make_cache(model, way) for way in ways}
        read_prompt(model, list(caches.values()), prompt)
        return {way: reading(cache) for way, cache in caches.items()}

    def begin(way: str, prompt: Tensor) -> Reading:
        return next(iter(read((way,), prompt).values()))

    if work.rounds:
        clock(model, work, begin, out)
    else:
        run(model, work, read, out)


if __name__ == "__main__":
    main()
