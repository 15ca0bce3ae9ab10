"""This project's caches in transformers, and transformers' own."""

import sys
import time
from collections.abc import Sequence

import torch
from _native import expect_native
from _protocol import Opened, answers, own_output, put, room_given, versions
from torch.nn.functional import cross_entropy
from transformers import Cache

from kv_eval.evaluate.decode import forced, read
from kv_transformers.from_text import held, make_cache
from kv_transformers.models import load_model


class Transformers:
    """A model in bfloat16, and the caches that are open."""

    def __init__(self, threads: int) -> None:
        """Load the model."""
        torch.set_num_threads(threads)
        self.model = load_model(device="cpu").model
        self._open: dict[str, tuple[Cache, torch.Tensor]] = {}

    def open(self, way: str, prompt: Sequence[int], batch: int, room: int) -> Opened:
        """Read the prompt alone, and for several sequences once more for all of them.

        A cache that is repeated would hold the pages of all sequences once.
        """
        cache, ids = make_cache(self.model, way), torch.tensor([prompt])
        began = time.perf_counter()
        token = read(self.model, cache, ids).argmax(-1)
        first = time.perf_counter() - began
        if batch > 1:
            cache = make_cache(self.model, way)
            token = read(self.model, cache, ids.expand(batch, -1)).argmax(-1)
        self._open[way] = cache, token[:, None]
        return Opened(first, held(cache).kv_bytes)

    def steps(self, way: str, count: int) -> list[float]:
        """Decode greedily."""
        cache, token = self._open[way]
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            token = read(self.model, cache, token).argmax(-1)[:, None]
            seconds.append(time.perf_counter() - began)
        self._open[way] = cache, token
        return seconds

    def close(self, way: str) -> None:
        """Drop the cache."""
        del self._open[way]

    def nats(self, way: str, prompt: Sequence[int], target: Sequence[int]) -> float:
        """Feed the prompt's last token and the target one by one over the compressed prompt."""
        cache = make_cache(self.model, way)
        read(self.model, cache, torch.tensor([prompt[:-1]]))
        logits = read(self.model, cache, torch.tensor([prompt[-1:]]))
        steps = forced(self.model, cache, logits, torch.tensor([target]))
        pairs = zip(steps, target, strict=True)
        losses = [float(cross_entropy(each.double(), torch.tensor([t]))) for each, t in pairs]
        return sum(losses) / len(losses)


def main() -> None:
    """Answer what is asked."""
    out, (_, room) = own_output(), room_given()
    expect_native()
    engine = Transformers(room.threads)
    put(out, versions("kv-transformers", "torch", "transformers"))
    with torch.inference_mode():
        answers(engine, sys.stdin, out)


if __name__ == "__main__":
    main()
