"""Inputs with a picture for small models that see, as far as they are alike.

How many tokens a picture takes differs, so several counts are tried: a model raises if the tokens
of its input are not as many as its vision tower gives.
"""

from collections.abc import Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BEGIN: Final = 10  # column of the first token of a picture, after the padding
COUNTS: Final = (16, 17, 4, 1, 15, 9, 8, 6, 2, 20)
SIDE: Final = 4  # patches
TOKEN: Final = ("image_token_id", "image_token_index")

Given = dict[str, Tensor]


def with_picture(model: "PreTrainedModel", ids: Tensor) -> Iterator[tuple[Tensor, Given]]:
    """Yield ids (B, L) with tokens of a picture in each row, and the arguments beside them.

    The pictures differ between rows. Nothing is yielded for a model that does not see.
    """
    config: Any = model.config
    vision = getattr(config, "vision_config", None)
    names = signature(model.forward).parameters
    token = next((getattr(config, each) for each in TOKEN if hasattr(config, each)), None)
    if vision is None or token is None or "pixel_values" not in names:
        return
    patch = getattr(vision, "patch_size", None)
    patch = patch if isinstance(patch, int) else 8
    if "image_grid_thw" in names:
        shapes = _by_patches(vision, len(ids), patch)
    else:
        shapes = _whole(vision, len(ids), patch)
    random = torch.Generator().manual_seed(13)
    for shape, counts, more in shapes:
        pixels = torch.randn(shape, generator=random)
        for count in counts:
            mixed = ids.clone()
            mixed[:, BEGIN : BEGIN + count] = token
            kinds = {
                each: (mixed == token).long()
                for each in ("mm_token_type_ids", "token_type_ids")
                if each in names
            }
            rest = {each: value for each, value in more.items() if each in names}
            yield mixed, {"pixel_values": pixels, **kinds, **rest}


def _by_patches(
    vision: Any, batch: int, patch: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Given]]:
    """Yield shapes of pixels that are a row per patch, with a grid."""
    merge = getattr(vision, "spatial_merge_size", None) or 2
    frames = getattr(vision, "temporal_patch_size", None) or 1
    grid = torch.tensor([[1, SIDE, SIDE]] * batch)
    more = {"image_grid_thw": grid, "image_merge_sizes": torch.tensor([merge] * batch)}
    rows = batch * SIDE * SIDE
    counts = (SIDE * SIDE // merge**2, 6)
    yield (rows, 3 * frames * patch * patch), counts, more
    yield (rows, 3, patch, patch), counts, more


def _whole(
    vision: Any, batch: int, patch: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Given]]:
    """Yield shapes of pixels that are whole pictures."""
    size = getattr(vision, "image_size", None)
    size = size if isinstance(size, int) else SIDE * patch
    sizes = {"image_sizes": torch.tensor([[size, size]] * batch)}
    shown = {"pixel_attention_mask": torch.ones(batch, 1, size, size, dtype=torch.bool)}
    yield (batch, 3, size, size), COUNTS, {}
    yield (batch, 3, size, size), COUNTS, sizes
    yield (batch, 1, 3, size, size), COUNTS, {}
    yield (batch, 1, 3, size, size), COUNTS, shown
