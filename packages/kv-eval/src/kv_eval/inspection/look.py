"""Inspection of a compressed cache after a model has read a prompt."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import UInt8
from torch import Tensor

from kv_eval.evaluate.decode import read
from kv_eval.inspection.prompt import Piece
from kv_eval.inspection.record import DIGITS, NOT_HELD, Inspection, Spot, Token
from kv_policy.installing import versions
from kv_runtime import NOWHERE, Holding, MemoryReport, Serving, holding

if TYPE_CHECKING:
    from kv_transformers import CompressedCache
    from kv_transformers.models import LoadedModel

_PARTS: Final = (  # of a MemoryReport; their sum is its total
    *("vector_bytes", "score_bytes", "position_bytes", "unfilled_bytes", "spare_bytes"),
    *("window_bytes", "table_bytes", "basis_bytes", "other_bytes"),
)


def inspected(
    loaded: "LoadedModel", cache: "CompressedCache", prompt: Sequence[Piece], served: Serving
) -> Inspection:
    """Read a prompt with an empty cache, and record the cache's contents.

    Args:
        loaded: the model, with or without a folded basis.
        cache: an empty cache of this model.
        prompt: its tokens; at least one.
        served: the attention backend.

    Raises:
        ValueError: the policy has more places than the file has characters for.
    """
    read(loaded.model, cache, torch.tensor([[piece.id for piece in prompt]]))
    found, memory = holding(cache.runtime), cache.memory()
    if len(found.places) > len(DIGITS):
        raise ValueError(
            f"{cache.policy} stores tokens in {len(found.places)} places; at most {len(DIGITS)} "
            "can be recorded"
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
        memory=_bytes(memory),
        places=_spots(found),
        tokens=_tokens(found, prompt),
        kept=tuple(map(tuple, found.held.sum(-1)[:, 0].tolist())),
        held=_written(found.place[:, 0]),
    )


def _bytes(memory: MemoryReport) -> dict[str, int]:
    """Return the bytes by name; those of other layers only if the model has any."""
    found = {name: int(getattr(memory, name)) for name in _PARTS}
    if not memory.other_bytes:
        del found["other_bytes"]
    return found


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
    """Return a text for each layer and head, with one character per token."""
    letters = torch.full((NOWHERE + 1,), ord(NOT_HELD), dtype=torch.uint8)
    letters[: len(DIGITS)] = torch.tensor(list(DIGITS.encode()), dtype=torch.uint8)
    shown = letters[place.cpu().long()]
    return tuple(tuple(bytes(head).decode() for head in layer) for layer in shown.tolist())
