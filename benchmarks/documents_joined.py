"""Two documents that were compressed by themselves and follow each other, beside one text of both.

SmolLM2-135M-Instruct reads a text that hides a number (the task `needle`) and a window of plain
text, each for a cache of its own, which are saved, and loaded into one cache in either order. The
question follows. Beside it stands one prompt with the same tokens in the same order, compressed as
a whole. A cell is the share of the numbers that are found.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import _result
import torch
from rich.console import Console
from torch import Tensor

from kv_eval.evaluate.decode import answer, ends_of, read
from kv_eval.evaluate.intervals import of_change, of_mean
from kv_eval.tasks import Sample, default_text, needle, nll
from kv_eval.tasks.scoring import found_share
from kv_transformers import CompressedCache
from kv_transformers.models import LoadedModel, load_model

CONSOLE: Final = Console(stderr=True)
LENGTH: Final = 1000  # tokens of a document
POLICIES: Final = {
    "raw": "raw",
    "k8v4": "k8v4",
    "gate": "gate:file=smollm2-135m,keep=50%,recent=64+k8v4",
}
Row = dict[str, object]


def compressed(loaded: LoadedModel, policy: str, ids: Tensor) -> CompressedCache:
    """Read a prompt with a cache of its own."""
    cache = CompressedCache(loaded.model, policy)
    read(loaded.model, cache, ids)
    return cache


def score(loaded: LoadedModel, cache: CompressedCache, sample: Sample) -> float:
    """Return the share of a sample's numbers in the answer to its question."""
    model = loaded.model
    logits = read(model, cache, torch.tensor([sample.question_ids]))
    (tokens,) = answer(model, cache, logits, sample.new_tokens, ends_of(model))
    return found_share(loaded.tokenizer.decode(tokens), sample.answers)


def rows(loaded: LoadedModel, length: int, samples: int, folder: Path) -> Iterator[Row]:
    """Measure each policy with the number in the first document, and in the second."""
    given = {"length": length, "samples": samples}
    hiding = needle(loaded.tokenizer, default_text(), setting="agnostic", **given)
    plain = nll(loaded.tokenizer, default_text(), seed=1, continuation=1, **given)
    for name, policy in POLICIES.items():
        apart: dict[str, list[float]] = {"first": [], "second": []}
        whole: dict[str, list[float]] = {"first": [], "second": []}
        for sample, other in zip(hiding, plain, strict=True):
            ids = [torch.tensor([x.prompt_ids]) for x in (sample, other)]
            paths = [folder / "needle.kv", folder / "plain.kv"]
            for path, each in zip(paths, ids, strict=True):
                compressed(loaded, policy, each).save(path, each)
            for place, order in (("first", (0, 1)), ("second", (1, 0))):
                joint = CompressedCache.load(loaded.model, [paths[i] for i in order])
                apart[place].append(score(loaded, joint, sample))
                one = compressed(loaded, policy, torch.cat([ids[i] for i in order], 1))
                whole[place].append(score(loaded, one, sample))
        for place in apart:
            yield described(name, policy, place, length, apart[place], whole[place])


def described(
    name: str, policy: str, place: str, length: int, apart: Sequence[float], whole: Sequence[float]
) -> Row:
    """Return a row: the shares found, their intervals, and that of the change."""
    return {
        "name": name,
        "policy": policy,
        "number_in": place,
        "tokens": 2 * length,
        "samples": len(apart),
        "joined": fmean(apart),
        "joined_interval": of_mean(apart),
        "one_text": fmean(whole),
        "one_text_interval": of_mean(whole),
        "change": of_change(apart, whole),
    }


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    loaded = load_model(progress=CONSOLE.print)
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        length, samples = (200, 2) if quick else (LENGTH, 32)
        for row in rows(loaded, length, samples, Path(folder)):
            found.append(row)
            CONSOLE.print(row)
    summary = {
        f"{way}_{name}": fmean(float(str(row[way])) for row in found if row["name"] == name)
        for name in POLICIES
        for way in ("joined", "one_text")
    }
    for name, value in summary.items():
        print(f"{name:36} {value:.4f}")
    _result.write("documents_joined", summary, found, quick=quick)


if __name__ == "__main__":
    main()
