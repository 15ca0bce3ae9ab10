"""What a rotation before the codec saves: SmolLM2-135M reads held-out text from quantized caches.

Windows are of Python's help topics. A prompt is prefilled, and the tokens after it are decoded one
at a time, all windows in a batch: each token attends to stored tokens in their formats and to
itself.
`rise` is the increase of nats per token over `raw` in the same windows, with the interval of its
mean; the ratio is that of two means of rises. Statistics for centred keys and for the pair are of
docstrings of Python's standard library, so no window was read in calibration. A rotation keeps the
shape of vectors, so all variants of a format store equally many bytes, which is checked.

The step is one decoded token of one sequence behind a prompt, in processor time of one thread:
without the rotation, with it, and with that of values folded into the model's weights, in turns.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import _result
import torch
from _timing import timed
from _zack import docstrings, statistics
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy

from kv_eval.evaluate.intervals import of_change
from kv_eval.tasks import default_text
from kv_transformers import CompressedCache, Fold, passing
from kv_transformers.models import LoadedModel, load_model

CONSOLE: Final = Console(stderr=True)
RAW: Final = "raw"
FORMATS: Final = ("k4v4", "k4v2")
VARIANTS: Final[Mapping[str, str]] = {  # FILE: the statistics
    "plain": "",
    "hadamard": "hadamard+",
    "centred": "hadamard:file=FILE+",
    "pair": "hadamard:file=FILE,pair=true+",
}

Row = dict[str, object]


@dataclass(frozen=True)
class Size:
    """How much is run."""

    windows: int
    prompt: int  # tokens of a window that are read at once
    decoded: int  # tokens that follow
    calibrated: int  # tokens of statistics
    context: int  # tokens before a timed step
    rounds: int


FULL: Final = Size(48, 256, 128, 8192, 1024, 30)
QUICK: Final = Size(2, 24, 8, 512, 32, 2)


def windows_of(loaded: LoadedModel, size: Size) -> Tensor:
    """Held-out windows, spread over the text."""
    ids = loaded.tokenizer.encode(default_text().body, add_special_tokens=False, verbose=False)
    length = size.prompt + size.decoded + 1
    stride = (len(ids) - length) // max(1, size.windows - 1)
    return torch.tensor([ids[i * stride :][:length] for i in range(size.windows)])


def read(loaded: LoadedModel, spec: str, windows: Tensor, size: Size) -> tuple[list[float], int]:
    """Return the nats per decoded token of each window, and the bytes of its stored vectors."""
    model, cache = loaded.model, CompressedCache(loaded.model, spec)
    options = passing(model, cache)
    total = torch.zeros(len(windows))
    with torch.inference_mode():
        model.base_model(windows[:, : size.prompt], **options, use_cache=True)
        for i in range(size.prompt, windows.shape[1] - 1):
            logits = model(windows[:, i : i + 1], **options, use_cache=True).logits[:, -1]
            total += cross_entropy(logits.float(), windows[:, i + 1], reduction="none")
    return (total / size.decoded).tolist(), cache.memory().vector_bytes


def rises(loaded: LoadedModel, file: Path, size: Size) -> Iterator[Row]:
    """Measure all variants of all formats over the raw cache."""
    windows = windows_of(loaded, size)
    raw, _ = read(loaded, RAW, windows, size)
    yield {"kind": "nats", "policy": RAW, "nats": fmean(raw), "windows": raw}
    for form in FORMATS:
        stored: set[int] = set()
        for variant, prefix in VARIANTS.items():
            CONSOLE.print(f"{variant} {form}")
            found, held = read(loaded, f"{prefix.replace('FILE', str(file))}{form}", windows, size)
            stored.add(held)
            assert len(stored) == 1, f"{variant} {form} stores {held} bytes, others {stored}"
            yield {
                "kind": "rise",
                "format": form,
                "variant": variant,
                "policy": f"{prefix.replace('FILE', 'F')}{form}",
                "vector_bytes": held,
                "nats": fmean(found),
                "rise": fmean(found) - fmean(raw),
                "interval": of_change(found, raw),
                "windows": found,
            }


def step_of(loaded: LoadedModel, spec: str, prompt: Tensor) -> Callable[[], object]:
    """Return a decode step behind a prompt; each call adds a token."""
    model, cache = loaded.model, CompressedCache(loaded.model, spec)
    options = passing(model, cache)
    model.base_model(prompt, **options, use_cache=True)
    return lambda: model(prompt[:, -1:], **options, use_cache=True)


def step_row(loaded: LoadedModel, size: Size) -> Row:
    """Time a decode step with and without the rotation."""
    ids = loaded.tokenizer.encode(default_text().body, add_special_tokens=False, verbose=False)
    prompt = torch.tensor([ids[: size.context]])
    policy, other = "hadamard+k4v4", load_model()
    with torch.inference_mode(), Fold(other.model, policy):
        work = {
            "hadamard": step_of(loaded, policy, prompt),
            "plain": step_of(loaded, "k4v4", prompt),
            "folded": step_of(other, policy, prompt),
        }
        turns = timed(work, size.rounds)
    found = {name: turns.quartiles((name,), ("plain",)) for name in ("hadamard", "folded")}
    return {"kind": "step", "policy": policy, "tokens": size.context, "over_plain": found}


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that a document may quote."""
    found: dict[str, float] = {}
    for form in FORMATS:
        here = {row["variant"]: row for row in rows if row.get("format") == form and "rise" in row}
        plain = float(str(here["plain"]["rise"]))
        for variant, row in here.items():
            found[f"rise_{form}_{variant}"] = float(str(row["rise"]))
            if variant != "plain":
                found[f"ratio_{form}_{variant}"] = float(str(row["rise"])) / plain
    (step,) = (row for row in rows if row["kind"] == "step")
    over = step["over_plain"]
    assert isinstance(over, dict)
    return found | {f"step_{name}": quartiles[1] for name, quartiles in over.items()}


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    size = QUICK if quick else FULL
    loaded = load_model(progress=CONSOLE.print)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.safetensors"
        for done in statistics(loaded, docstrings(), size.calibrated, file):
            CONSOLE.print(f"{done:,} tokens read for statistics")
        rows = [*rises(loaded, file, size)]
    rows.append(step_row(loaded, size))
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:24} {value:.4f}")
    _result.write("rotation", summary, rows, quick=quick)


if __name__ == "__main__":
    main()
