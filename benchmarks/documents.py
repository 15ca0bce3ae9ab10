"""A document's compressed cache in a file: its size, the time to load it, and whether it is exact.

SmolLM2-135M-Instruct reads 8,064 random tokens once, on one thread, for caches of several policies
at once, and each cache is written to a file. Loading includes the fingerprint of the model, the
checksums of every byte, and all checks. Seconds are processor time of the thread; loading is the
median of several. Bytes held are all of the cache, tables and free slots included. Logits are those
of a question and of generated tokens after it, compared bit for bit with the saved cache's.

A loaded document is then repeated for 16 questions at once, and its bytes are counted again, before
the questions are read and after each has been answered.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import _result
import torch
from _native import expect_native
from rich.console import Console
from torch import Tensor

from kv_transformers import CompressedCache, passing
from kv_transformers.models import LoadedModel, load_model

CONSOLE = Console(stderr=True)
FIRST = "k8v4"  # under which the prompt is timed
POLICIES = (
    FIRST,
    "raw",
    "k4v2:window=128",
    "snapkv:budget=1024+k8v4",
    "kv-compress:keep=25%+k8v4",
    "gate:file=smollm2-135m,keep=25%,recent=64+k8v4",
    "h2o:budget=1024+k8v4:keys=channel,window=128",
)
QUESTION, STEPS, QUESTIONS = 16, 4, 16
Row = dict[str, object]


def answers(loaded: LoadedModel, cache: CompressedCache, questions: int = 1) -> Tensor:
    """Return the logits of questions and of some tokens after each."""
    model, found, shape = loaded.model, [], (questions, QUESTION)
    begin = torch.randint(9, 999, shape, generator=torch.Generator().manual_seed(2))
    for step in range(STEPS + 1):
        fresh = begin if step == 0 else found[-1][:, -1:].argmax(-1)
        found.append(model(fresh, **passing(model, cache)).logits)
    return torch.cat(found, 1)


def together(loaded: LoadedModel, path: Path) -> Row:
    """Return the bytes of a document that is asked many questions at once, over those of one."""
    many = CompressedCache.load(loaded.model, path)
    one = own_bytes(many)
    began = time.thread_time()
    many.batch_repeat_interleave(QUESTIONS)
    seconds, before = time.thread_time() - began, own_bytes(many)
    answers(loaded, many, QUESTIONS)
    return {
        "questions": QUESTIONS,
        "repeat_s": seconds,
        "repeated_over_one": before / one,
        "answered_over_one": own_bytes(many) / one,
    }


def own_bytes(cache: CompressedCache) -> int:
    """Return the bytes of a cache; its basis belongs to the policy."""
    report = cache.memory()
    return report.total_bytes - report.basis_bytes


def rows(loaded: LoadedModel, ids: Tensor, rounds: int, folder: Path) -> Iterator[Row]:
    """Read the prompt once for all policies; save, load and ask each cache."""
    model = loaded.model
    caches = [CompressedCache(model, policy) for policy in POLICIES]
    alone = CompressedCache(model, FIRST)
    began = time.thread_time()
    model(ids, logits_to_keep=1, **passing(model, alone))
    prefill = time.thread_time() - began
    CONSOLE.print(f"prompt of {ids.shape[1]:,} tokens: {prefill:.1f} s")
    caches[0].share_prefill(caches[1:])
    model(ids, logits_to_keep=1, **passing(model, caches[0]))
    for cache in caches:
        path, seconds = folder / "book.kv", []
        began = time.thread_time()
        cache.save(path, ids)
        saving = time.thread_time() - began
        for _ in range(rounds):
            began = time.thread_time()
            found = CompressedCache.load(model, path, ids=ids)
            seconds.append(time.thread_time() - began)
        report, size, held = cache.memory(), path.stat().st_size, own_bytes(cache)
        exact = torch.equal(answers(loaded, found), answers(loaded, cache))
        yield {
            "policy": str(cache.policy),
            "tokens": ids.shape[1],
            "rounds": rounds,
            "prefill_s": prefill,
            "save_s": saving,
            "load_s": median(seconds),
            "load_over_prefill": median(seconds) / prefill,
            "file_bytes": size,
            "held_bytes": held,
            "file_over_held": size / held,
            "file_over_full": size / report.full_bytes,
            "identical": exact,
        } | together(loaded, path)


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    expect_native()
    torch.set_num_threads(1)
    loaded = load_model(progress=CONSOLE.print)
    tokens = 512 if quick else 8064
    ids = torch.randint(9, 40000, (1, tokens), generator=torch.Generator().manual_seed(1))
    found = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for row in rows(loaded, ids, 2 if quick else 7, Path(folder)):
            found.append(row)
            CONSOLE.print(row)
    summary = {
        "load_over_prefill_8k": max(float(str(row["load_over_prefill"])) for row in found),
        "load_over_prefill_8k_k8v4": float(str(found[0]["load_over_prefill"])),
        "file_over_held": max(float(str(row["file_over_held"])) for row in found),
        "file_over_full_k8v4": float(str(found[0]["file_over_full"])),
        "sharers_hold_once": float(str(found[0]["repeated_over_one"])),
        "sharers_answered": float(str(found[0]["answered_over_one"])),
        "sharers_answered_gate": float(str(found[5]["answered_over_one"])),
        "sharers_answered_snapkv": float(str(found[3]["answered_over_one"])),
        "identical": sum(bool(row["identical"]) for row in found) / len(found),
    }
    for name, value in summary.items():
        print(f"{name:36} {value:.4f}")
    _result.write("documents", summary, found, quick=quick)


if __name__ == "__main__":
    main()
