"""Reading a few tokens to see what a model's code does between its projections and attention."""

from collections.abc import Sequence
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
    model: "PreTrainedModel", modules: Sequence[nn.Module], output: Sequence[str], what: Folded
) -> None:
    """Refuse a model that changes vectors between the projections that a basis is folded into.

    What the value projection gives has to reach the cache as it is, and what attention gives the
    output projection. With keys to be folded, keys too, and queries but for a factor.

    Args:
        model: not folded yet.
        modules: its attention modules, by layer.
        output: what the output projection of each is called.
        what: what is to be folded.

    Raises:
        UnsupportedModelError: something is changed on the way; the message says what.
    """

    def show(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        arrived[layer] = {"v_proj": value, "k_proj": key, "q_proj": query}
        given[layer] = out.flatten(2)

    arrived: dict[int, dict[str, Tensor]] = {}
    given: dict[int, Tensor] = {}
    seen: dict[nn.Module, list[Tensor]] = {}  # layers that share a projection call it in order
    names = ["v_proj"] * ("values" in what) + ["k_proj", "q_proj"] * ("keys" in what)
    places: list[tuple[int, str, nn.Module]] = []
    for layer, (module, last) in enumerate(zip(modules, output, strict=True)):
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
                f"{type(model).__name__} does something {side} {name} of layer {layer} that a "
                "basis does not go through, so it cannot be folded; use the policy's cache "
                "without folding"
            )


def read(model: "PreTrainedModel", cache: object) -> None:
    """Let a model read a few tokens over a cache."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(TOKENS, device=model.device)[None] * 7 + 3) % vocabulary
    with torch.no_grad():
        model(ids, **passing(model, cache))


def _watch(projection: nn.Module, into: list[Tensor], inputs: bool) -> "RemovableHandle":
    """Keep what a projection reads, or what it gives, in the order of its calls."""

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
    """Whether vectors are equal, or in proportion."""
    if made.shape != other.shape:
        return False
    if not factor:
        return torch.equal(made, other)
    a, b = made.double().flatten(), other.double().flatten()
    rest = b - a * (a @ b / (a @ a))
    return bool(rest.norm() <= 0.02 * b.norm())
