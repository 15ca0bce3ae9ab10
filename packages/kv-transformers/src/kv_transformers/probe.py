"""Run a few tokens to detect operations between a model's projections and attention."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kv_runtime import Folded
from kv_transformers.cache_argument import passing
from kv_transformers.support import UnsupportedModelError
from kv_transformers.watching import WatchingCache

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

TOKENS: Final = 7


def expect_direct(
    model: "PreTrainedModel", modules: Mapping[int, nn.Module], output: Sequence[str], what: Folded
) -> None:
    """Raise if a model changes vectors between the projections that a basis is folded into.

    The output of the value projection must reach the cache unchanged, and the output of attention
    the output projection. If keys are folded, so must keys, and queries up to a factor.

    Args:
        model: not folded yet.
        modules: its attention modules of layers that a policy stores, by layer.
        output: name of the output projection of each.
        what: the parts to fold.

    Raises:
        UnsupportedModelError: vectors are changed; the message names the projection.
    """

    def show(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        arrived[layer] = {"v_proj": value, "k_proj": key, "q_proj": query}
        given[layer] = out.flatten(2)

    arrived: dict[int, dict[str, Tensor]] = {}
    given: dict[int, Tensor] = {}
    seen: dict[nn.Module, list[Tensor]] = {}  # layers with a shared projection call it in order
    names = ["v_proj"] * ("values" in what) + ["k_proj", "q_proj"] * ("keys" in what)
    places: list[tuple[int, str, nn.Module]] = []
    for layer, (module, last) in enumerate(zip(modules.values(), output, strict=True)):
        children = dict(module.named_children())
        asked = [*names, *([last] if "values" in what else [])]
        places += [(layer, name, children[name]) for name in asked]
    handles = []
    for _, name, projection in places:
        if projection not in seen:
            seen[projection] = []
            handles.append(_watch(projection, seen[projection], inputs=name in output))
    try:
        read(model, WatchingCache(model, show))
    finally:
        for handle in handles:
            handle.remove()
    made = {(layer, name): seen[projection].pop(0) for layer, name, projection in places}
    for (layer, name), x in made.items():
        other = given[layer] if name == output[layer] else _flat(arrived[layer][name])
        if not _same(x, other, factor=name == "q_proj"):
            side = "before" if name == output[layer] else "after"
            raise UnsupportedModelError(
                f"{type(model).__name__} has an operation {side} {name} of layer "
                f"{[*modules][layer]} that does not commute with a basis, so it cannot be folded; "
                "use the policy's cache without folding"
            )


def read(model: "PreTrainedModel", cache: object) -> None:
    """Run a few tokens through a model with a cache."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(TOKENS, device=model.device)[None] * 7 + 3) % vocabulary
    with torch.no_grad():
        model(ids, **passing(model, cache))


def _watch(projection: nn.Module, into: list[Tensor], inputs: bool) -> "RemovableHandle":
    """Record the inputs or the outputs of a projection, in the order of its calls."""

    def reads(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        into.append(given[0])

    def gives(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        into.append(out)

    if inputs:
        return projection.register_forward_pre_hook(reads)
    return projection.register_forward_hook(gives)


def _flat(x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B L HD"]:
    return x.transpose(1, 2).flatten(2)


def _same(made: Tensor, other: Tensor, factor: bool) -> bool:
    """Return whether vectors are equal, or proportional if `factor` is set."""
    if made.shape != other.shape:
        return False
    if not factor:
        return torch.equal(made, other)
    a, b = made.double().flatten(), other.double().flatten()
    rest = b - a * (a @ b / (a @ a))
    return bool(rest.norm() <= 0.02 * b.norm())
