"""Samples of an evaluation in vLLM: one engine per policy, one sample at a time.

vLLM reads a prompt to its end before compressing it, so a question must be inside the prompt, and
the token after the prompt is computed with an uncompressed cache; all others are computed with the
compressed cache. `full` is vLLM's own cache.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.plan import Plan
from kv_eval.evaluate.scored import Said, finished
from kv_eval.tasks import Sample, Text
from kv_transformers.from_text import FULL

if TYPE_CHECKING:
    from kv_eval.vllm.asking import Engine
    from kv_transformers.models import LoadedModel

Numbered = tuple[int, Sample]
ROOM = 512  # extra tokens beside an uncompressed prompt


def run(loaded: "LoadedModel", plan: Plan, text: Text, journal: Journal) -> Iterator[Finished]:
    """Run every sample with every policy, `full` before the others; yield each when finished.

    Samples in the journal are yielded at once and not run again.

    Args:
        loaded: the model, whose tokenizer creates the samples.
        plan: a plan with questions inside their prompts.
        text: source of the prompts.
        journal: receives every finished sample.

    Raises:
        TaskError: a task cannot be created from the plan, or exceeds the context length.
        ValueError: vLLM refuses a policy for this model.
        RuntimeError: an engine exited before it had answered.
    """
    from kv_eval.vllm.asking import replies

    work = [numbered for samples in plan.made(loaded, text) for numbered in enumerate(samples)]
    token_bytes = raw_token_bytes(loaded)
    for spec in plan.policies:
        known = [_known(journal, spec, each) for each in work]
        yield from (entry for entry in known if entry is not None)
        missing = [each for each, entry in zip(work, known, strict=True) if entry is None]
        if not missing:
            continue
        asked = [sample for _, sample in missing]
        engine = _engine(loaded, spec, asked, token_bytes)
        for (i, sample), reply in zip(missing, replies(engine, asked), strict=True):
            full_bytes = sample.length * token_bytes
            said = Said(reply.tokens, reply.nats, reply.kv_bytes, full_bytes, reply.seconds)
            reference = None if spec == FULL else _known(journal, FULL, (i, sample))
            entry = finished(loaded, spec, i, sample, said, reference)
            journal.append([entry])
            yield entry


def raw_token_bytes(loaded: "LoadedModel") -> int:
    """Return the bytes of one token's keys and values in all layers, uncompressed."""
    from kv_transformers import cache_shape

    return cache_shape(loaded.model).token_bytes


def _engine(
    loaded: "LoadedModel", spec: str, samples: Sequence[Sample], token_bytes: int
) -> "Engine":
    from kv_eval.vllm.asking import Engine

    longest = max(s.length + len(s.target_ids) + s.new_tokens for s in samples)
    return Engine(
        model=str(loaded.folder),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        policy=None if spec == FULL else spec,
        kv_bytes=(2 * longest + ROOM) * token_bytes,
        longest=longest,
    )


def _known(journal: Journal, spec: str, numbered: Numbered) -> Finished | None:
    i, sample = numbered
    return journal.get(spec, sample.task, sample.setting, i)
