"""Windows of documents from files, for layers that vLLM keeps.

A file has the keys and values of the last tokens of a window as transformers keeps them. vLLM's
attention stores them in its blocks, as it does with new tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kv_serve.vllm.config import UnservableError
from kv_serve.vllm.messages import Place
from kv_serve.vllm.names import DOCUMENTS, PREFIX

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


@dataclass(frozen=True, slots=True, eq=False)
class WindowLayer:
    """A layer with a window.

    Attributes:
        name: of its tensors in a file.
        group: its group among those of other layers.
        layer: vLLM's layer.
        block_tokens: tokens of a block.
        most: the most tokens before the next one that it attends to.
    """

    name: str
    group: int
    layer: Attention
    block_tokens: int
    most: int

    def expect(self, own: Mapping[str, Tensor], tokens: int) -> None:
        """Raise unless a file has the keys and values of this layer after `tokens` tokens.

        Raises:
            ValueError: it does not.
        """
        held, layer = min(tokens, self.most), self.layer
        for part, size in (("key", layer.head_size), ("value", layer.head_size_v)):
            name, wanted = f"{self.name}.{part}", (1, layer.num_kv_heads, held, size)
            found = own.get(name)
            if found is None or tuple(found.shape) != wanted or not found.is_floating_point():
                shape = None if found is None else tuple(found.shape)
                raise ValueError(f"{name} should be floats of {wanted}, found {shape}")

    def write(self, own: Mapping[str, Tensor], tokens: int, place: Place) -> None:
        """Store these keys and values in blocks, from the first column of the place on."""
        column, blocks = place
        size, device = self.block_tokens, self.layer.kv_cache.device
        first = max(tokens - min(tokens, self.most), column * size)
        position = torch.arange(first, tokens, device=device)
        if len(position) == 0:
            return
        block = torch.tensor(blocks, device=device)[position // size - column]

        def rows(part: str) -> Tensor:
            mine = own[f"{self.name}.{part}"][0, :, -len(position) :].transpose(0, 1)
            return mine.to(device, self.layer.kv_cache_torch_dtype).contiguous()

        slots = block * size + position % size
        cache, given = self.layer.kv_cache, (rows("key"), rows("value"))
        self.layer.impl.do_kv_cache_update(self.layer, *given, cache, slots)


@dataclass(frozen=True, slots=True)
class LoadedWindows:
    """The layers that vLLM keeps, into which documents are loaded."""

    layers: tuple[WindowLayer, ...]

    @classmethod
    def of(cls, config: "VllmConfig", groups: "Sequence[KVCacheGroupSpec]") -> "LoadedWindows":
        """Find the layers of the groups that are not under the policy, if documents are loaded.

        Raises:
            UnservableError: a layer has no window.
        """
        layers = config.compilation_config.static_forward_context
        found: list[tuple[int, int, Attention, int, int]] = []
        if config.additional_config.get(DOCUMENTS) is None:
            return cls(())
        for number, group in enumerate(groups):
            spec = group.kv_cache_spec
            if type(spec) is not SlidingWindowSpec:
                raise UnservableError(
                    f"{DOCUMENTS} is given, but a layer of this model has a {type(spec).__name__}, "
                    "and files are loaded beside windows alone; omit it, and let a request for the "
                    f"document name it by {PREFIX}"
                )
            for name in group.layer_names:
                layer = layers[name]
                assert isinstance(layer, Attention), "it has keys and values"
                if layer.kv_sharing_target_layer_name is None:
                    index = extract_layer_index(name)
                    most = spec.sliding_window - 1
                    found.append((index, number, layer, spec.block_size, most))
        found.sort(key=lambda each: each[0])  # a file counts the layers that it has, in order
        return cls(tuple(WindowLayer(f"own.{i}", *each[1:]) for i, each in enumerate(found)))

    def expect(self, own: Mapping[str, Tensor], tokens: int) -> None:
        """Raise unless a file has what these layers keep after `tokens` tokens, and no more.

        Raises:
            ValueError: it does not.
        """
        for each in self.layers:
            each.expect(own, tokens)
        known = {f"{each.name}.{part}" for each in self.layers for part in ("key", "value")}
        if strange := sorted(own.keys() - known):
            raise ValueError(f"{strange[0]} is of no layer that vLLM keeps")

    def write(self, own: Mapping[str, Tensor], tokens: int, places: Sequence[Place]) -> None:
        """Store what a file has of these layers in blocks, a place for each group."""
        for each in self.layers:
            each.write(own, tokens, places[each.group])
