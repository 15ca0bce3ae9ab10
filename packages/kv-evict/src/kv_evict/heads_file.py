"""The file of head scores: how much each KV head of a model retrieves from far away."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import torch
from jaxtyping import Bool, Float
from msgspec import Meta
from torch import Tensor

from kv_policy import CacheShape, NotCalibratedError, best
from kv_policy.decoding import decode
from kv_policy.tensor_files import Stamp, read, stamp, write

FORMAT: Final = "kv-evict heads 1"
CALIBRATION: Final = "heads"

Kind: TypeAlias = Literal["induction", "echo", "loss"]
KINDS: Final[tuple[Kind, ...]] = ("induction", "echo", "loss")

Count = Annotated[int, Meta(ge=1)]


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a file of head scores."""

    model: str  # display name
    fingerprint: str  # of its weights, settings and tokenizer
    text: str  # how the tokens were drawn
    digest: str  # of these tokens
    tokens: Count  # that were read
    period: Count  # tokens after which they repeat
    layers: Count
    heads: Count  # KV heads per layer


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Scores of all KV heads in memory; two are equal only if they are the same.

    Attributes:
        facts: the header.
        scores: float32 by kind. "induction" and "echo" are shares of attention, "loss" the squared
            error of the outputs when the head sees only both ends of the sequence, over the squared
            outputs of its layer.
    """

    facts: Facts
    scores: dict[Kind, Float[Tensor, "N H"]]

    def retrieving(
        self, shares: tuple[tuple[Kind, float], ...], device: torch.device
    ) -> Bool[Tensor, "N H"]:
        """Mark the heads that are among the given share of the highest scores of any kind; cached.

        A share is of all heads of the model, rounded up to whole heads; of equal scores the heads
        of earlier layers count.
        """
        return _retrieving(self, shares, device)

    def on(self, kind: Kind, device: torch.device) -> Float[Tensor, "N H"]:
        """Return the scores of a kind on a device; cached."""
        return _placed(self, kind, device)

    def expect(self, name: str, shape: CacheShape) -> None:
        """Raise unless the scores are of a model with these layers and heads.

        Raises:
            ValueError: layers or heads differ from the calibrated model.
        """
        last = shape.first_head + shape.kv_heads
        for what, here, fitted in (
            ("layers", shape.layers, self.facts.layers),
            ("KV heads", max(last, self.facts.heads), self.facts.heads),
        ):
            if here != fitted:
                raise ValueError(
                    f"{name}: the head scores are of a model with {fitted} {what}, but this cache "
                    f"has {here}; calibrate its own model"
                )


@lru_cache(maxsize=32)
def _retrieving(
    found: HeadScores, shares: tuple[tuple[Kind, float], ...], device: torch.device
) -> Bool[Tensor, "N H"]:
    with torch.inference_mode(False):  # cached tensors outlive the caller
        chosen = torch.zeros(found.facts.layers, found.facts.heads, dtype=torch.bool)
        for kind, share in shares:
            count = torch.tensor(ceil(share * chosen.numel() - 1e-9))
            chosen |= best(found.scores[kind].flatten(), count).view_as(chosen)
        return chosen.to(device)


@lru_cache(maxsize=32)
def _placed(found: HeadScores, kind: Kind, device: torch.device) -> Float[Tensor, "N H"]:
    with torch.inference_mode(False):  # cached tensors outlive the caller
        return found.scores[kind].to(device)


def save(path: Path, found: HeadScores) -> None:
    """Write head scores atomically.

    Raises:
        ValueError: the sizes in the facts differ from those of the scores, or a score is not
            finite.
        OSError: writing failed; an existing file is unchanged.
    """
    _check(path, found)
    tensors = {str(kind): found.scores[kind] for kind in KINDS}
    write(path, FORMAT, msgspec.json.encode(found.facts).decode(), tensors)


def load(policy: str, file: str) -> HeadScores:
    """Load head scores; cached until the file changes.

    Args:
        policy: the name of the policy that reads them, for the message.
        file: its path.

    Raises:
        NotCalibratedError: the file does not exist.
        ValueError: it is damaged or holds no head scores.
    """
    try:
        return _load(stamp(Path(file)))
    except FileNotFoundError:
        raise NotCalibratedError(policy, file, CALIBRATION) from None


@lru_cache(maxsize=8)
def _load(file: Stamp) -> HeadScores:
    text, tensors = read(file.path, FORMAT, CALIBRATION)
    try:
        facts = decode(text, Facts)
    except ValueError as error:
        raise ValueError(f"{file.path} has an invalid header: {error}; calibrate again") from None
    if set(tensors) != set(KINDS):
        raise ValueError(f"{file.path} holds no {', '.join(KINDS)}; calibrate again")
    found = HeadScores(facts, {kind: tensors[kind] for kind in KINDS})
    _check(file.path, found)
    return found


def _check(path: Path, found: HeadScores) -> None:
    sizes = (found.facts.layers, found.facts.heads)
    for kind in KINDS:
        score = found.scores[kind]
        if score.dtype != torch.float32 or tuple(score.shape) != sizes:
            raise ValueError(
                f"{path}: {kind} should be float32 of {sizes}, and is {score.dtype} of "
                f"{tuple(score.shape)}; calibrate again"
            )
        if not score.isfinite().all():
            raise ValueError(f"{path}: a score is infinite or NaN; calibrate again")
