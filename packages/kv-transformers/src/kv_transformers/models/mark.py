"""The mark of a folded checkpoint, whose value and output projections hold a value basis."""

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from kv_transformers.models.source import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MARK: Final = "kv_folded"  # in config.json, and in the metadata of each weight file
Digits = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


class FoldMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the weights of a checkpoint were folded with.

    Attributes:
        basis: fingerprint of the value basis; see `kv_policy.FoldsValues`.
        source: fingerprint of the model before, with which the basis was calibrated.
        model: fingerprint of the folded model, which changes if its weights do.
    """

    basis: Digits
    source: Digits
    model: Digits


def read_mark(found: Any) -> FoldMark | None:
    """Return the mark from its entry in a configuration; None: the model is not folded.

    Raises:
        ModelError: the entry is damaged.
    """
    if found is None:
        return None
    try:
        return msgspec.convert(found, FoldMark)
    except msgspec.ValidationError as error:
        raise ModelError(
            f"{MARK} in the model's config.json is damaged ({error}); fold the model again with "
            "kv-serve fold"
        ) from error


def mark_of(config: "PreTrainedConfig") -> FoldMark | None:
    """Return the mark of a loaded configuration; None: the model is not folded.

    Raises:
        ModelError: the entry is damaged.
    """
    return read_mark(getattr(config, MARK, None))


def folded_with(config: "PreTrainedConfig") -> str | None:
    """Return the fingerprint of the value basis in a model's weights, for its `CacheShape`."""
    mark = mark_of(config)
    return None if mark is None else mark.basis
