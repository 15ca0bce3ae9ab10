"""Letting a model read a prompt over a compressed cache, and looking at what the cache holds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import UInt8
from torch import Tensor

from kv_eval.evaluate.decode import read
from kv_eval.inspection.prompt import Piece
from kv_eval.inspection.record import DIGITS, NOT_HELD, Inspection, Spot, Token
from kv_policy.installing import versions
from kv_runtime import NOWHERE, Holding, Serving, holding

if TYPE_CHECKING:
    from kv_transformers import CompressedCache
    from kv_transformers.models import LoadedModel

_PARTS: Final = (  # of a MemoryReport, which add up to its total
    *("vector_bytes", "score_bytes", "position_bytes", "unfilled_bytes", "spare_bytes"),
    *("window_bytes", "table_bytes", "basis_bytes"),
)


def inspected(
    loaded: "LoadedModel", cache: "CompressedCache", prompt: Sequence[Piece], served: Serving
) -> Inspection:
    """Let a model read a prompt over an empty cache, and write down what is held then.

    Args:
        loaded: the model, folded for the cache's policy or not.
        cache: empty, and of this model.
        prompt: its tokens; at least one.
        served: what attends.

    Raises:
        ValueError: the policy holds tokens in more ways than the file has characters for.
    """
    read(loaded.model, cache, torch.tensor([[piece.id for piece in prompt]]))
    found, memory = holding(cache.runtime), cache.memory()
    if len(found.places) > len(DIGITS):
        raise ValueError(
            f"{cache.policy} holds tokens in {len(found.places)} ways, and at most {len(DIGITS)} "
            "can be written down"
        )
    layers, _, heads, _ = found.place.shape
    return Inspection(
        model=loaded.name,
        policy=str(cache.policy),
        attention=served,
        versions=versions(),
        layers=layers,
        heads=heads,
        kv_bytes=memory.total_bytes,
        full_bytes=memory.full_bytes,
        memory={name: int(getattr(memory, name)) for name in _PARTS},
        places=_spots(found),
        tokens=_tokens(found, prompt),
        kept=tuple(map(tuple, found.held.sum(-1)[:, 0].tolist())),
        held=_written(found.place[:, 0]),
    )


def _spots(found: Holding) -> tuple[Spot, ...]:
    counts = found.counts().sum((1, 2, 3)).tolist()
    return tuple(
        Spot(name=place.name, kind=place.kind, tokens=count, bytes=place.nbytes)
        for place, count in zip(found.places, counts, strict=True)
    )


def _tokens(found: Holding, prompt: Sequence[Piece]) -> tuple[Token, ...]:
    each = [(found.place[:, 0] == place).sum((0, 1)) for place in range(len(found.places))]
    counts = torch.stack(each, 1).tolist()
    return tuple(
        Token(
            id=piece.id,
            text=piece.text,
            name="" if piece.text else piece.shown,
            held=tuple(held),
        )
        for piece, held in zip(prompt, counts, strict=True)
    )


def _written(place: UInt8[Tensor, "N H L"]) -> tuple[tuple[str, ...], ...]:
    """A text for each layer and head, with a character for each token."""
    letters = torch.full((NOWHERE + 1,), ord(NOT_HELD), dtype=torch.uint8)
    letters[: len(DIGITS)] = torch.tensor(list(DIGITS.encode()), dtype=torch.uint8)
    shown = letters[place.cpu().long()]
    return tuple(tuple(bytes(head).decode() for head in layer) for layer in shown.tolist())
