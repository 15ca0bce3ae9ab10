"""Running samples under caches, one batch after another, and keeping each result."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from kv_serve.evaluate.caches import MakeCache, held, make_cache
from kv_serve.evaluate.decode import answer, ends_of, nats, read
from kv_serve.evaluate.journal import Finished, Journal
from kv_serve.evaluate.plan import Plan
from kv_serve.evaluate.specs import FULL
from kv_serve.tasks import Sample, TaskError, Text, agreement_share, found

if TYPE_CHECKING:
    from kv_serve.models import LoadedModel


def run(
    loaded: "LoadedModel",
    plan: Plan,
    text: Text,
    journal: Journal,
    make: MakeCache = make_cache,
) -> Iterator[Finished]:
    """Finish every sample under every cache, `full` before the others; give each as it is there.

    Samples that the journal has are given at once and not run again.

    Raises:
        TaskError: a task cannot be made from the plan, or is longer than the model reads.
        ValueError: a policy is refused for this model.
    """
    work = [(t, s, plan.samples_of(loaded, text, t, s)) for t, s in plan.pairs]
    for _, _, samples in work:
        _check_length(loaded, samples)
    for spec in plan.policies:
        make(loaded.model, spec)  # whatever is refused is refused before the first sample
    for task, setting, samples in work:
        size = plan.batch_of(task)
        for spec in plan.policies:
            for start in range(0, len(samples), size):
                part = range(start, min(start + size, len(samples)))
                known = [journal.get(spec, task, setting, i) for i in part]
                done = [entry for entry in known if entry is not None]
                if len(done) < len(part):
                    chosen = [samples[i] for i in part]
                    references = [journal.get(FULL, task, setting, i) for i in part]
                    done = _batch(loaded, spec, start, chosen, references, make)
                    journal.append(done)
                yield from done


def _batch(
    loaded: "LoadedModel",
    spec: str,
    start: int,
    samples: Sequence[Sample],
    references: Sequence[Finished | None],
    make: MakeCache,
) -> list[Finished]:
    """Run samples of equal lengths together."""
    model, first = loaded.model, samples[0]
    began = time.perf_counter()
    cache = make(model, spec)
    read(model, cache, torch.tensor([s.prompt_ids for s in samples]))
    size = held(cache)
    logits = read(model, cache, torch.tensor([s.question_ids for s in samples]))
    tokens: tuple[tuple[int, ...], ...] = ((),) * len(samples)
    if first.target_ids:
        targets = torch.tensor([s.target_ids for s in samples])
        scores = nats(model, cache, logits, targets).tolist()
    else:
        ends = ends_of(model) if first.stop else ()
        tokens = answer(model, cache, logits, first.new_tokens, ends)
        scores = [
            _score(loaded, sample, said, reference.tokens if reference else said)
            for sample, said, reference in zip(samples, tokens, references, strict=True)
        ]
    seconds = (time.perf_counter() - began) / len(samples)
    for score in scores:
        if not math.isfinite(score):
            raise FloatingPointError(
                f"{spec} gave a score of {score} on {first.task}: the model's output is not finite"
            )
    return [
        Finished(
            policy=spec,
            task=sample.task,
            setting=sample.setting,
            sample=start + i,
            score=score,
            kv_bytes=round(size.kv_bytes / len(samples)),
            full_bytes=round(size.full_bytes / len(samples)),
            seconds=seconds,
            tokens=said,
        )
        for i, (sample, score, said) in enumerate(zip(samples, scores, tokens, strict=True))
    ]


def _score(
    loaded: "LoadedModel", sample: Sample, said: tuple[int, ...], reference: tuple[int, ...]
) -> float:
    if sample.answer:
        return float(found(str(loaded.tokenizer.decode(list(said))), sample.answer))
    return agreement_share(said, reference)


def _check_length(loaded: "LoadedModel", samples: Sequence[Sample]) -> None:
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    longest = max(s.length + len(s.target_ids) + s.new_tokens for s in samples)
    if limit is not None and longest > limit:
        raise TaskError(
            f"{samples[0].task} at this length takes up to {longest:,} tokens with what comes "
            f"after the prompt; the model {loaded.name} reads {limit:,}, so ask for fewer"
        )
