"""Decode steps of a plain model, beside those of an earlier commit.

SmolLM2-135M in bfloat16, one thread: a prompt of 1,000 tokens, then 16 steps at a time, in turn.
The earlier commit has an environment of its own (`--before`, its Python), in a process that waits
while this one works. Seconds are processor time. Ratios are quartiles of those of each round.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from time import process_time
from typing import IO, Final

import torch

POLICIES: Final = ("raw", "k8v4", "leankv", "kv-compress:rate=4+k8v4")
PROMPT: Final = 1000
STEPS: Final = 16


class Decoder:
    """A model with a cache that has read a prompt."""

    def __init__(self, spec: str, prompt: int) -> None:
        """Load the model and read the prompt."""
        from kv_transformers import CompressedCache, passing
        from kv_transformers.models import load_model

        torch.set_num_threads(1)
        self.model = load_model().model
        self.cache = CompressedCache(self.model, spec)
        self.given = passing(self.model, self.cache)
        with torch.inference_mode():
            self.model(torch.arange(3, 3 + prompt)[None], **self.given)

    def steps(self, count: int) -> float:
        """Decode some tokens; return the seconds of a step."""
        began = process_time()
        with torch.inference_mode():
            for _ in range(count):
                self.model(torch.tensor([[7]]), **self.given)
        return (process_time() - began) / count


def waiting(given: IO[str], said: IO[str]) -> None:
    """Answer each line, `spec prompt` to begin and then a number of steps, with seconds."""
    spec, prompt = given.readline().split()
    decoder = Decoder(spec, int(prompt))
    print("ready", file=said, flush=True)
    for line in given:
        print(decoder.steps(int(line)), file=said, flush=True)


@contextmanager
def beside(python: Path, spec: str, prompt: int) -> Iterator[Callable[[int], float]]:
    """Run a decoder in the environment of another Python; the steps are asked of it."""
    command = (str(python), __file__, "--wait")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        there, back = process.stdin, process.stdout

        def asked(line: str) -> str:
            print(line, file=there, flush=True)
            return back.readline()

        if asked(f"{spec} {prompt}").strip() != "ready":
            raise RuntimeError(f"{python} ended without decoding {spec}; its output is above")
        yield lambda count: float(asked(str(count)))
        there.close()


def main() -> None:
    """Measure every policy and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--before", type=Path, default=Path(sys.executable), help="a Python")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.wait:
        waiting(sys.stdin, sys.stdout)
        return
    import _result

    rounds, prompt = (2, 50) if given.quick else (given.rounds, PROMPT)
    rows, figures = [], {}
    for spec in POLICIES:
        now = Decoder(spec, prompt)
        with beside(given.before, spec, prompt) as before:
            pairs = []
            for i in range(rounds + 1):
                first = before(STEPS) if i % 2 else 0.0
                mine = now.steps(STEPS)
                pairs.append((mine, first or before(STEPS)))
        ratios = [mine / theirs for mine, theirs in pairs[1:]]
        quartiles = quantiles(ratios, n=4, method="inclusive")
        seconds = [median(each) for each in zip(*pairs[1:], strict=True)]
        rows.append({"policy": spec, "seconds": seconds, "ratio": quartiles})
        name = "".join(c if c.isalnum() else "_" for c in spec)
        figures[f"over_before_{name}"] = quartiles[1]
        print(rows[-1])
    _result.write("decode_before", figures, rows, quick=given.quick)


if __name__ == "__main__":
    main()
