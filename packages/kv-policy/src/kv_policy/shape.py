"""The fixed sizes of a model's KV cache."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: dimensions i and i + D / 2 turn by position * frequencies[i]."""

    frequencies: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model's cache looks like on one device: the whole of it, or a shard of its KV heads.

    `kv_heads` counts the heads held here; under tensor parallelism `first_head` says where they
    start among all heads of a layer, so that whatever is per head can be cut to the shard.
    """

    layers: int  # N
    kv_heads: int  # H, on this device
    group: int  # G, query heads per KV head
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16
    first_head: int = 0
    rope: Rope | None = None  # None: unknown, or of another kind

    def __post_init__(self) -> None:
        """Check that every size is positive."""
        for name in ("layers", "kv_heads", "group", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a cache shape needs at least 1")
        if self.first_head < 0:
            raise ValueError(f"first_head is {self.first_head}; heads are counted from 0")

    @property
    def token_bytes(self) -> int:
        """Bytes one uncompressed token takes over all layers and KV heads."""
        vector = (self.key_dim + self.value_dim) * self.dtype.itemsize
        return self.layers * self.kv_heads * vector
