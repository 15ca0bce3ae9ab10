"""What was said for a sample, as a finished sample with its score."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_eval.evaluate.journal import Finished
from kv_eval.tasks import Sample, agreement_share, found_share

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel


@dataclass(frozen=True, slots=True)
class Said:
    """What a policy's cache led to, and what it took.

    Attributes:
        tokens: what was generated.
        nats: per token of the sample's targets; None where it has none.
        kv_bytes: held after the prompt.
        full_bytes: what an uncompressed cache takes for it.
        seconds: of reading the prompt and answering.
        kept: tokens after the prompt, by layer and KV head; empty where nobody counted them.
    """

    tokens: tuple[int, ...]
    nats: float | None
    kv_bytes: int
    full_bytes: int
    seconds: float
    kept: tuple[tuple[int, ...], ...] = ()


def finished(
    loaded: "LoadedModel",
    policy: str,
    number: int,
    sample: Sample,
    said: Said,
    reference: Finished | None,
) -> Finished:
    """Score a sample.

    Args:
        loaded: whose tokenizer reads the answer.
        policy: what the cache was compressed by.
        number: of the sample in its task and setting.
        sample: what was asked.
        said: what came of it.
        reference: the same sample under the full cache; None if this is it.

    Raises:
        FloatingPointError: the score is not finite.
    """
    score = _score(loaded, sample, said, said.tokens if reference is None else reference.tokens)
    if not math.isfinite(score):
        raise FloatingPointError(
            f"{policy} gave a score of {score} on {sample.task}: the model's output is not finite"
        )
    return Finished(
        policy=policy,
        task=sample.task,
        setting=sample.setting,
        sample=number,
        score=score,
        kv_bytes=said.kv_bytes,
        full_bytes=said.full_bytes,
        seconds=said.seconds,
        tokens=said.tokens,
        kept=said.kept,
    )


def _score(loaded: "LoadedModel", sample: Sample, said: Said, reference: tuple[int, ...]) -> float:
    if said.nats is not None:
        return said.nats
    if sample.answers:
        return found_share(str(loaded.tokenizer.decode(list(said.tokens))), sample.answers)
    return agreement_share(said.tokens, reference)
