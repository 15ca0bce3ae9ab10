"""Running samples with caches, batch by batch, and saving each result.

A prompt is read once for several policies; each cache then answers separately.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch

from kv_eval.evaluate.decode import answer, ends_of, forced, read
from kv_eval.evaluate.divergence import Reference, Steps, scored
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.scored import Said, finished, is_final
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
        yield from run_samples(
            loaded, plan.policies, samples, journal, make, size, together=together
        )


def run_samples(
    loaded: "LoadedModel",
    policies: Sequence[str],
    samples: Sequence[Sample],
    journal: Journal,
    make: MakeCache,
    batch: int,
    *,
    first: int = 0,
    together: int = TOGETHER,
) -> Iterator[Finished]:
    """Run samples of one task and setting with every cache; see `run`.

    Args:
        loaded: the model.
        policies: canonical, `full` first.
        samples: to run.
        journal: receives every finished sample.
        make: creates the caches.
        batch: the most samples that run together; only neighbours of equal lengths do.
        first: number of the first sample.
        together: caches of one prompt in memory at the same time.
    """
    for place, chosen in _batches(samples, batch):
        start = first + place
        reference = Reference(partial(_steps_of_full, loaded, chosen, make))
        for specs in _together(policies, together):
            have = {spec: _known(journal, spec, chosen, start) for spec in specs}
            missing = [spec for spec in specs if not have[spec]]
            fresh = _finish(loaded, missing, start, chosen, journal, make, reference)
            for spec in specs:
                if not have[spec]:
                    have[spec] = next(fresh)
                    journal.append(have[spec])
                yield from have[spec]


def _batches(samples: Sequence[Sample], most: int) -> Iterator[tuple[int, Sequence[Sample]]]:
    """Yield runs of at most `most` samples whose parts are equally long, with their place."""
    place = 0
    for _, group in groupby(samples, key=_lengths):
        alike = [*group]
        for i in range(0, len(alike), most):
            yield place + i, alike[i : i + most]
        place += len(alike)


def _lengths(sample: Sample) -> tuple[int, int, int]:
    return len(sample.prompt_ids), len(sample.question_ids), len(sample.target_ids)


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
    reference: Reference,
) -> Iterator[list[Finished]]:
    """Run samples of equal lengths together; yield the results of one cache after another."""
    if not specs:
        return
    began = time.perf_counter()
    caches = [make(loaded.model, spec) for spec in specs]
    read_prompt(loaded.model, caches, _prompts(samples))
    shared = (time.perf_counter() - began) / len(specs)
    known = [journal.get(FULL, s.task, s.setting, start + i) for i, s in enumerate(samples)]
    caches.reverse()  # each is freed once it has answered
    for spec in specs:
        yield _ask(loaded, spec, caches.pop(), start, samples, known, reference, shared)


def _ask(
    loaded: "LoadedModel",
    spec: str,
    cache: "Cache",
    start: int,
    samples: Sequence[Sample],
    known: Sequence[Finished | None],
    reference: Reference,
    shared: float,
) -> list[Finished]:
    """Query a cache that has read the prompts; `shared` is its share of the prefill seconds.

    Args:
        loaded: the model.
        spec: text of the policy.
        cache: the cache.
        start: number of the first sample.
        samples: of equal lengths.
        known: the same samples with the full cache; None: this is it.
        reference: logits of the full cache; from here, if this is it.
        shared: seconds of the prefill.
    """
    model, first = loaded.model, samples[0]
    began = time.perf_counter() - shared
    size = held(cache)
    logits = read(model, cache, _questions(samples))
    spoken: tuple[tuple[int, ...], ...] = ((),) * len(samples)
    surprise: Sequence[float | None] = [None] * len(samples)
    apart: Sequence[tuple[float, ...]] = [()] * len(samples)
    if first.target_ids:
        targets = _targets(samples, logits.device)
        steps = forced(model, cache, logits, targets)
        if spec == FULL:
            surprise, apart = scored(reference.recorded(steps), targets, None)
        else:
            surprise, apart = scored(steps, targets, reference)
    else:
        ends = ends_of(model) if first.stop else ()
        spoken = answer(
            model,
            cache,
            logits,
            first.new_tokens,
            ends,
            lambda i, tokens: is_final(loaded, samples[i], tokens),
        )
    seconds = (time.perf_counter() - began) / len(samples)
    kv_bytes, full_bytes = (round(n / len(samples)) for n in (size.kv_bytes, size.full_bytes))
    kept = size.kept or ((),) * len(samples)
    said = [
        Said(tokens, of, kv_bytes, full_bytes, seconds, stay, away)
        for tokens, of, stay, away in zip(spoken, surprise, kept, apart, strict=True)
    ]
    return [
        finished(loaded, spec, start + i, *each)
        for i, each in enumerate(zip(samples, said, known, strict=True))
    ]


def _steps_of_full(loaded: "LoadedModel", samples: Sequence[Sample], make: MakeCache) -> Steps:
    """Run the full cache over a batch once more, for its logits at every target."""
    cache = make(loaded.model, FULL)
    read(loaded.model, cache, _prompts(samples))
    logits = read(loaded.model, cache, _questions(samples))
    return forced(loaded.model, cache, logits, _targets(samples, logits.device))


def _prompts(samples: Sequence[Sample]) -> torch.Tensor:
    return torch.tensor([sample.prompt_ids for sample in samples])


def _questions(samples: Sequence[Sample]) -> torch.Tensor:
    return torch.tensor([sample.question_ids for sample in samples])


def _targets(samples: Sequence[Sample], device: torch.device) -> torch.Tensor:
    return torch.tensor([sample.target_ids for sample in samples], device=device)
