"""Running samples with caches, batch by batch, and saving each result.

A prompt is read once for several policies; each cache then answers separately.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch

from kv_eval.evaluate.decode import answer, ends_of, nats, read
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.scored import Said, finished
from kv_eval.evaluate.shared import read_prompt
from kv_eval.tasks import Sample, Text
from kv_transformers.from_text import FULL, MakeCache, caches_of, held

if TYPE_CHECKING:
    from transformers import Cache

    from kv_transformers.models import LoadedModel

TOGETHER: Final = 8  # caches of one prompt in memory at the same time


def run(
    loaded: "LoadedModel",
    plan: Plan,
    text: Text,
    journal: Journal,
    make: MakeCache | None = None,
    together: int = TOGETHER,
) -> Iterator[Finished]:
    """Run every sample with every cache, `full` before the others; yield each when finished.

    Policies share a prompt's forward pass and its seconds, `together` of them at a time; their
    caches are all in memory at once.

    Samples in the journal are yielded at once and not run again.

    Raises:
        TaskError: a task cannot be created from the plan, or exceeds the context length.
        ValueError: a policy does not support this model.
    """
    make = make or caches_of(loaded)
    work = plan.made(loaded, text)
    for spec in plan.policies:
        make(loaded.model, spec)  # refuse unsupported policies before the first sample
    for samples in work:
        size = plan.batch_of(samples[0].task)
        for start in range(0, len(samples), size):
            chosen = samples[start : start + size]
            for specs in _together(plan.policies, together):
                have = {spec: _known(journal, spec, chosen, start) for spec in specs}
                missing = [spec for spec in specs if not have[spec]]
                fresh = _finish(loaded, missing, start, chosen, journal, make)
                for spec in specs:
                    if not have[spec]:
                        have[spec] = next(fresh)
                        journal.append(have[spec])
                    yield from have[spec]


def _together(policies: Sequence[str], together: int) -> list[Sequence[str]]:
    """Return groups: `full` alone, as the baseline, then policies that share a pass."""
    rest = [policies[i : i + together] for i in range(1, len(policies), together)]
    return [policies[:1], *rest]


def _known(journal: Journal, spec: str, samples: Sequence[Sample], start: int) -> list[Finished]:
    """Return the journal's entries of a batch if it is complete, else an empty list."""
    found = [journal.get(spec, s.task, s.setting, start + i) for i, s in enumerate(samples)]
    done = [entry for entry in found if entry is not None]
    return done if len(done) == len(samples) else []


def _finish(
    loaded: "LoadedModel",
    specs: Sequence[str],
    start: int,
    samples: Sequence[Sample],
    journal: Journal,
    make: MakeCache,
) -> Iterator[list[Finished]]:
    """Run samples of equal lengths together; yield the results of one cache after another."""
    if not specs:
        return
    began = time.perf_counter()
    caches = [make(loaded.model, spec) for spec in specs]
    read_prompt(loaded.model, caches, torch.tensor([s.prompt_ids for s in samples]))
    shared = (time.perf_counter() - began) / len(specs)
    references = [journal.get(FULL, s.task, s.setting, start + i) for i, s in enumerate(samples)]
    caches.reverse()  # each is freed once it has answered
    for spec in specs:
        yield _ask(loaded, spec, caches.pop(), start, samples, references, shared)


def _ask(
    loaded: "LoadedModel",
    spec: str,
    cache: "Cache",
    start: int,
    samples: Sequence[Sample],
    references: Sequence[Finished | None],
    shared: float,
) -> list[Finished]:
    """Query a cache that has read the prompts; `shared` is its share of the prefill seconds."""
    model, first = loaded.model, samples[0]
    began = time.perf_counter() - shared
    size = held(cache)
    logits = read(model, cache, torch.tensor([s.question_ids for s in samples]))
    spoken: tuple[tuple[int, ...], ...] = ((),) * len(samples)
    surprise: list[float | None] = [None] * len(samples)
    if first.target_ids:
        targets = torch.tensor([s.target_ids for s in samples])
        surprise = nats(model, cache, logits, targets).tolist()
    else:
        ends = ends_of(model) if first.stop else ()
        spoken = answer(model, cache, logits, first.new_tokens, ends)
    seconds = (time.perf_counter() - began) / len(samples)
    kv_bytes, full_bytes = (round(n / len(samples)) for n in (size.kv_bytes, size.full_bytes))
    kept = size.kept or ((),) * len(samples)
    said = [
        Said(tokens, of, kv_bytes, full_bytes, seconds, stay)
        for tokens, of, stay in zip(spoken, surprise, kept, strict=True)
    ]
    return [
        finished(loaded, spec, start + i, *each)
        for i, each in enumerate(zip(samples, said, references, strict=True))
    ]
