"""The memory of vLLM's blocks, as pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from vllm.v1.kv_cache_interface import KVCacheConfig

from kv_runtime import Account
from kv_serve.vllm.config import UnservableError
from kv_serve.vllm.spec import PagedSpec


@dataclass(frozen=True)
class Memory:
    """The pages in all blocks, in the order of their addresses.

    vLLM gives each layer of a group a region of equal size, in which the layer's part of a block
    follows that of the block before. Layers of other groups use the same regions.
    """

    data: UInt8[Tensor, "P1 page_bytes"]  # the last is the scratch page
    account: Account
    kept: bool = False  # whether vLLM keeps other layers, whose blocks are in this memory, too
    blocks: int = 0
    parts: int = 0  # pages in a layer's part of a block
    regions: UInt8[Tensor, "R B block_bytes"] | None = None  # all layers' blocks, beside others

    @classmethod
    def of(cls, config: KVCacheConfig, caches: Mapping[str, Tensor]) -> "Memory":
        """Divide the memory of all layers, which is one allocation, into pages.

        Raises:
            UnservableError: vLLM has placed layers otherwise.
        """
        groups = [x for x in config.kv_cache_groups if isinstance(x.kv_cache_spec, PagedSpec)]
        spec = groups[0].kv_cache_spec
        assert isinstance(spec, PagedSpec)
        found = [caches[name].untyped_storage() for x in groups for name in x.layer_names]
        (_,) = {each.data_ptr() for each in found}  # vLLM allocates all layers' memory at once
        storage, account = found[0], spec.block
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        size, regions = account.page_bytes, None
        if spec.kept:
            _expect_regions(config, spec.page_size_bytes)
            region = config.num_blocks * spec.page_size_bytes
            every = flat[: len(flat) // region * region]
            regions = every.view(-1, config.num_blocks, spec.page_size_bytes)
            flat = flat[: account.block_bytes * config.num_blocks]
        data = flat[: len(flat) // size * size].view(-1, size)
        parts = spec.page_size_bytes // size
        return cls(data, account, spec.kept, config.num_blocks, parts, regions)

    def pages(self, blocks: Sequence[int]) -> Int[Tensor, " n"]:
        """Return the pages in blocks, without the scratch page."""
        regions = torch.arange(self.account.block_pages // self.parts, device=self.data.device)
        block = torch.tensor(blocks, dtype=torch.long, device=regions.device)
        part = torch.arange(self.parts, device=regions.device)
        found = ((regions[:, None] * self.blocks + block)[..., None] * self.parts + part).flatten()
        return found[found < len(self.data) - 1]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks over all layers, each from a block to another one; a target is no source."""
        if pairs:
            assert self.regions is not None, "other layers have blocks in this memory"
            given = torch.tensor(pairs, dtype=torch.long, device=self.regions.device)
            self.regions[:, given[:, 1]] = self.regions[:, given[:, 0]]

    def clear(self, blocks: Sequence[int]) -> None:
        """Clear blocks over all layers."""
        if blocks:
            assert self.regions is not None, "other layers have blocks in this memory"
            self.regions[:, torch.tensor(blocks, device=self.regions.device)] = 0


def _expect_regions(config: KVCacheConfig, size: int) -> None:
    region = size * config.num_blocks
    for tensor in config.kv_cache_tensors:
        far = tensor.layer_stride if len(tensor.layers) > 1 else region
        if (tensor.block_stride, far, tensor.offset % region) != (size, region, 0):
            raise UnservableError(
                f"vLLM places blocks {tensor.block_stride} bytes apart and layers "
                f"{tensor.layer_stride}, but pages beside other layers need {size} and {region}"
            )
