"""Scoring of a sample's output."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

from kv_eval.evaluate.journal import Finished
from kv_eval.tasks import Match, Sample, agreement_share, found_share, match_all, match_part

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel

_MATCHES: Final[Mapping[Match, Callable[[str, Sequence[str]], float]]] = {
    "words": found_share,
    "all": match_all,
    "part": match_part,
}


@dataclass(frozen=True, slots=True)
class Said:
    """The output of a policy's cache, and its cost.

    Attributes:
        tokens: generated tokens.
        nats: per token of the sample's targets; None without targets.
        kv_bytes: cache bytes after the prompt.
        full_bytes: of an uncompressed cache.
        seconds: for reading the prompt and answering.
        kept: tokens kept after the prompt, by layer and KV head; empty if not counted.
        divergences: from the full cache's next-token distributions, at each target, in nats; empty
            without targets, under vLLM, and for the full cache itself.
    """

    tokens: tuple[int, ...]
    nats: float | None
    kv_bytes: int
    full_bytes: int
    seconds: float
    kept: tuple[tuple[int, ...], ...] = ()
    divergences: tuple[float, ...] = ()


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
        loaded: the model, whose tokenizer decodes the answer.
        policy: text of the cache's policy.
        number: of the sample in its task and setting.
        sample: the sample.
        said: its output.
        reference: the same sample with the full cache; None if this is it.

    Raises:
        FloatingPointError: the score or a divergence is not finite.
    """
    score = _score(loaded, sample, said, said.tokens if reference is None else reference.tokens)
    if not math.isfinite(score):
        raise FloatingPointError(
            f"the score of {policy} is {score} on {sample.task}: the model's output is not finite"
        )
    odd = next((each for each in said.divergences if not math.isfinite(each)), None)
    if odd is not None:
        raise FloatingPointError(
            f"the divergence of {policy} from the full cache is {odd} at a token of {sample.task}"
        )
    heads = [tokens for layer in said.kept for tokens in layer]
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
        divergences=said.divergences,
        kept_share=fmean(heads) / len(sample.prompt_ids) if heads else None,
    )


def is_final(loaded: "LoadedModel", sample: Sample, tokens: Sequence[int]) -> bool:
    """Return whether more tokens cannot change the score: all strings of a string match are there.

    Whole words are never final, as the next token may go on with the last one.
    """
    return sample.match != "words" and _matched(loaded, sample, tokens) == 1


def _matched(loaded: "LoadedModel", sample: Sample, tokens: Sequence[int]) -> float:
    return _MATCHES[sample.match](str(loaded.tokenizer.decode(list(tokens))), sample.answers)


def _score(loaded: "LoadedModel", sample: Sample, said: Said, reference: tuple[int, ...]) -> float:
    if said.nats is not None:
        return said.nats
    if sample.answers:
        return _matched(loaded, sample, said.tokens)
    return agreement_share(said.tokens, reference)
