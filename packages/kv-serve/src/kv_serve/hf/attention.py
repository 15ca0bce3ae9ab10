"""The attention function that lets transformers attend over pages in place.

`update` of the cache hands the fresh keys on with a mark; the function registered here sees the
mark and asks the cache to attend. Without the mark it is transformers' own SDPA attention.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_serve.hf.folded import FoldedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME: Final = "kv_serve"  # of the attention implementation, in a model's configuration


@runtime_checkable
class Attends(Protocol):
    """What the attention function asks of a cache."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B Hv L Dv"],
        scale: float,
        valid: Bool[Tensor, "B L"] | None,
    ) -> Float[Tensor, "B L *out"]:
        """Attend over everything held and the fresh tokens, then store those."""
        ...

    def expect_next(self, position: Int[Tensor, "_ L"], valid: Bool[Tensor, "B L"] | None) -> None:
        """Raise if the tokens of a pass do not come after those that are held."""
        ...


class FreshKeys(Tensor):
    """Keys of a forward pass on their way from the cache to the attention function."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    cache: Attends
    layer: int

    @classmethod
    def mark(cls, key: Tensor, cache: Attends, layer: int) -> "FreshKeys":
        """Mark the keys with the cache and the layer they belong to."""
        marked = key.as_subclass(cls)
        marked.cache, marked.layer = cache, layer
        return marked


class PaddingMask(Tensor):
    """The batch's 2D padding mask, with a recipe for the usual 4D mask if a layer wants that."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    whole: Callable[[], Tensor | None]
    padded: bool


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> PaddingMask:
    from transformers.masking_utils import sdpa_mask

    padded = attention_mask is not None
    columns = attention_mask if attention_mask is not None else torch.ones(1, 1, dtype=torch.bool)
    mask = columns.as_subclass(PaddingMask)
    mask.padded = padded
    mask.whole = lambda: sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        **options,
    )
    return mask


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(key, FreshKeys):
        if any(isinstance(child, FoldedLinear) for child in module.children()):
            raise ValueError(
                "the model's projections are folded for a policy's basis; pass a CompressedCache "
                "of that policy as the cache, or restore the model"
            )
        mask = attention_mask
        if isinstance(mask, PaddingMask):
            mask = mask.whole()
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, **options
        )
        return out, None
    for name in ("softcap", "s_aux", "sliding_window"):
        if options.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for {name}, which a compressed cache does not do"
            )
    if dropout or (query.requires_grad and torch.is_grad_enabled()):
        raise ValueError(
            "a compressed cache serves inference only: put the model in eval() and call it under "
            "torch.inference_mode() or torch.no_grad()"
        )
    valid = None
    if isinstance(attention_mask, PaddingMask):
        if attention_mask.padded:
            valid = attention_mask.as_subclass(Tensor)[:, -query.shape[2] :].bool()
    elif attention_mask is not None:
        raise ValueError(
            f"an attention mask of shape {tuple(attention_mask.shape)} was given; a compressed "
            "cache takes a 2D mask that marks padding"
        )
    place = options.get("position_ids")  # most models hand them on
    if key.layer == 0 and query.shape[2] > 1 and isinstance(place, Tensor) and place.ndim == 2:
        key.cache.expect_next(place, valid)
    fresh = key.as_subclass(Tensor)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return key.cache.attend(key.layer, query, fresh, value, scale, valid), None


def install(model: "PreTrainedModel") -> None:
    """Register the attention function and switch the model to it.

    Other caches, and no cache, go on working: they get transformers' SDPA attention.

    Raises:
        ValueError: the model's code does not take its attention function from the interface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if NAME not in AttentionInterface():
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _mask)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ValueError(
            f"{type(model).__name__} does not let its attention function be chosen, so a "
            "compressed cache cannot attend over its pages"
        )
