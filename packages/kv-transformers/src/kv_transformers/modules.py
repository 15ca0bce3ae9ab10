"""Find the attention modules of a transformers model, by layer."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from kv_transformers.support import OUTPUT, UnsupportedModelError, named_cross, says_cross

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Named: TypeAlias = tuple[str, nn.Module]


def attention_modules(model: "PreTrainedModel", layers: Sequence[int]) -> dict[int, Named]:
    """Return the self-attention module of each of these layers, with its name in the base model.

    Cross-attention, which may have the same `layer_idx`, is excluded: by the module's
    `is_cross_attention` if it has that, else by its name. Layers without a module are missing from
    the result.

    Raises:
        UnsupportedModelError: a layer has several candidate modules; the message names them.
    """
    found: dict[int, list[Named]] = {}
    for name, module in model.base_model.named_modules():
        index = getattr(module, "layer_idx", None)  # defined by transformers' attention modules
        if isinstance(index, int) and index in layers and not says_cross(module):
            found.setdefault(index, []).append((name, module))
    return {index: _own(model, index, found[index]) for index in sorted(found)}


def _own(model: "PreTrainedModel", layer: int, modules: list[Named]) -> Named:
    """Return the self-attention module; tests apply while more than one module is left."""
    tests: tuple[Callable[[str, nn.Module], bool], ...] = (
        lambda _, module: any(child in OUTPUT for child, _ in module.named_children()),
        lambda name, _: not named_cross(name),
        lambda name, _: "self" in name.rsplit(".", 1)[-1],
    )
    left = modules
    for test in tests:
        if len(left) > 1:
            left = [each for each in left if test(*each)] or left
    if len(left) == 1:
        return left[0]
    names = ", ".join(f"{name} ({type(module).__name__})" for name, module in left)
    raise UnsupportedModelError(
        f"layer {layer} of {type(model).__name__} has several attention modules, {names}, and "
        "neither is_cross_attention nor a name with self identifies the one that attends to the "
        "layer's own tokens"
    )
