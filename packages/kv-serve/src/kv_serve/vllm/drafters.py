"""Layers that draft for a model whose own layers are in pages: vLLM keeps them, beside our pages.

They are those of a draft model, or of a head of the model. What they store is not compressed, in
blocks of a group of their own.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from kv_serve.vllm.config import UnservableError
from kv_serve.vllm.extending import extend
from kv_serve.vllm.served import Kept

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

MODEL: Final = "draft_model"  # vLLM's method of a model that drafts; all others are heads
# A group has as many layers as the smallest kind, or the largest if that has less than this many
# times as many.
NEAR: Final = 1.5


@dataclass(frozen=True, kw_only=True)
class DraftSpec(FullAttentionSpec):
    """The spec of a layer that drafts; vLLM puts it into no group with layers of another type."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> "DraftSpec":
        """Return the spec of a layer whose stock spec is given."""
        return cls(**{each.name: getattr(spec, each.name) for each in fields(spec) if each.init})

    @classmethod
    def merge(cls, specs: list["DraftSpec"]) -> "DraftSpec":
        """Return the spec that all layers of a group share."""
        assert all(spec == specs[0] for spec in specs), "the layers of a group are alike"
        return specs[0]

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Return whether all specs are of this type, and so share a block table."""
        return all(isinstance(spec, DraftSpec) for spec in kv_cache_specs.values())


def drafts(layer: object) -> bool:
    """Return whether a layer drafts for a model in pages."""
    impl = getattr(layer, "impl", None)
    return isinstance(impl, Kept) and impl.drafts


def drafting_layers(config: VllmConfig) -> set[str]:
    """Return the names of the layers that draft for a model in pages."""
    layers = config.compilation_config.static_forward_context.items()
    return {name for name, layer in layers if drafts(layer)}


def check_drafters(specs: Iterable[KVCacheSpec], others: Iterable[int], policy: object) -> None:
    """Raise unless vLLM puts all layers that draft into one group.

    Args:
        specs: of the layers that draft, as their attention declares them.
        others: the numbers of layers of each other kind.
        policy: named in the message.

    Raises:
        UnservableError: the message says what would be right.
    """
    given = list(specs)
    served = f"the policy {policy} cannot be served with speculative decoding"
    if any(type(spec) is not FullAttentionSpec or spec != given[0] for spec in given):
        found = sorted({type(spec).__name__ for spec in given})
        raise UnservableError(
            f"{served} by layers of several kinds or sizes ({', '.join(found)}), whose blocks "
            "would be of several groups; draft by layers that all attend to all tokens"
        )
    counts = [len(given), *others]
    least, most = min(counts), max(counts)
    if len(given) > (most if most < NEAR * least else least):
        raise UnservableError(
            f"{served} by {len(given)} layers beside {min(others)} of the model, as vLLM would "
            "divide the former into several groups; draft by a model with fewer layers"
        )


def lead() -> None:
    """Let a draft model's layers be the first in vLLM's table; may be called repeatedly.

    Groups are in this order. vLLM's former model runner hands a draft model the block table of the
    first group, and a head that of its own.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    extend(GPUModelRunner, "get_kv_cache_spec", _first)


def _first(
    get: Callable[["GPUModelRunner"], dict[str, KVCacheSpec]], self: "GPUModelRunner"
) -> dict[str, KVCacheSpec]:
    found, names = get(self), leading(self.vllm_config)
    return {name: spec for name, spec in found.items() if name in names} | found


def leading(config: VllmConfig) -> set[str]:
    """Return the names of layers that must be in the first group: those of a draft model."""
    given = config.speculative_config
    return drafting_layers(config) if given is not None and given.method == MODEL else set()


def check_first(layers: Collection[str], group: Collection[str]) -> None:
    """Raise if a draft model would write to blocks of other layers.

    Args:
        layers: the names of its layers.
        group: those of vLLM's first group.

    Raises:
        UnservableError: the group is without them.
    """
    if not {*layers} <= {*group}:
        raise UnservableError(
            "vLLM puts the layers of the draft model into another group than its first, whose "
            "blocks it would write to; please report this with vLLM's version"
        )
