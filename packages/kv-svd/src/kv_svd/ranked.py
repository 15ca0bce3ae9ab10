"""Policies that keep the most important directions of each head."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Annotated, Literal

import torch
from jaxtyping import Float64
from msgspec import Meta
from torch import Tensor

from kv_policy import HeadBasis
from kv_policy.tensor_files import Stamp, stamp
from kv_svd.file import Facts, load
from kv_svd.fit import Directions, basis
from kv_svd.fitted import Fitted
from kv_svd.rates import (
    MULTIPLE,
    Allotment,
    Spectra,
    at_rate,
    at_removal,
    greatest_rate,
    uniform,
)
from kv_svd.statistics import LayerStatistics, Statistics

Rate = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class Ranked(Fitted):
    """Directions in descending order of importance, truncated to each head's rank."""

    rate: Annotated[Rate | None, Meta(description="share of the cache to remove")] = None
    removal: Annotated[
        Rate | None, Meta(description="share of each head's singular values to remove, not rate")
    ] = None
    ranks: Annotated[
        Literal["adaptive", "uniform"], Meta(description="per head, or equal for all heads")
    ] = "adaptive"
    multiple: Annotated[int, Meta(ge=1, description="ranks are rounded to multiples of this")] = (
        MULTIPLE
    )

    def __post_init__(self) -> None:
        """Check the parameters against each other and against the file.

        Raises:
            ValueError: see the base class, or both or none of rate and removal are given, or the
                rate is too high.
        """
        super().__post_init__()
        if self.rate is not None and self.removal is not None:
            raise ValueError(
                f"{self.name}: rate={self.rate} and removal={self.removal} were given; both set "
                "the ranks, so use one"
            )
        if self.removal is not None and self.ranks == "uniform":
            raise ValueError(
                f"{self.name}: removal={self.removal} gives each head its own rank; with "
                "ranks=uniform use keep=..., or a rate"
            )
        rate = self.found_rate(self.facts) if self._asked is None else self.rate
        dims = self.facts.key_dim * self.joined, self.facts.value_dim * self.joined
        if rate is not None and rate > greatest_rate(*dims, self.multiple):
            raise ValueError(
                f"{self.name}: a rate of {rate} cannot be reached: with ranks of a multiple of "
                f"{self.multiple}, heads of {dims[0]} and {dims[1]} dimensions give up at most "
                f"{self.multiple}, heads of {dims[0]} and {dims[1]} dimensions can drop at most "
                f"{ceil(1e4 * (1 - greatest_rate(*dims, self.multiple))) / 100:g}%"
            )

    @property
    def _asked(self) -> float | None:
        return self.rate if self.removal is None else self.removal

    @property
    def joined(self) -> int:
        """KV heads stored as one."""
        return 1

    @property
    def allotment(self) -> Allotment:
        """Ranks of all layers and heads, the resulting rate, and the cost of rounding."""
        return _allotted(self, stamp(self.path))

    @abstractmethod
    def directions(self, layer: LayerStatistics) -> tuple[Directions, Directions]:
        """Return all directions of a layer's keys and values, in descending importance."""

    def spectra(self, statistics: Statistics) -> Spectra:
        """Return the singular values that determine the ranks, by layer and stored head."""
        pairs = [self.directions(layer) for layer in statistics]
        return (
            torch.stack([key.singular for key, _ in pairs]),
            torch.stack([value.singular for _, value in pairs]),
        )

    def singular_values(self) -> dict[str, Float64[Tensor, "N H D"]]:
        """Return the singular values behind the ranks; the name includes file and parameters.

        See `kv_policy.Spectral`.
        """
        key, value = self.spectra(load(self.path)[1])
        together = f",together={self.joined}" if self.joined > 1 else ""
        whose = f"{self.name}:file={self.file}{together}"
        return {f"{whose}, keys": key, f"{whose}, values": value}

    def found_rate(self, facts: Facts) -> float:
        """Return the rate to use if none was given.

        Raises:
            ValueError: the policy has no default rate.
        """
        raise ValueError(
            f"{self.name} needs keep=... (the share of the dimensions to keep), or rate=... or "
            "removal=..."
        )

    def allot(self, statistics: Statistics) -> Allotment:
        """Convert the rate to ranks."""
        key, value = self.spectra(statistics)
        if self.removal is not None:
            return at_removal(key, value, self.removal, self.multiple)
        rate = self.found_rate(self.facts) if self.rate is None else self.rate
        find = at_rate if self.ranks == "adaptive" else uniform
        return find(key, value, rate, self.multiple)

    def maps(self, layer: int) -> tuple[HeadBasis | None, HeadBasis | None]:
        """Return the maps of a layer's keys and values, for all heads of the model."""
        return _found(self, stamp(self.path))[layer]


@lru_cache(maxsize=4)
def _found(policy: Ranked, file: Stamp) -> tuple[tuple[HeadBasis, HeadBasis], ...]:
    """Return the maps of all layers; cached, as a server makes many caches of one policy."""
    allotment = policy.allotment
    pairs = [policy.directions(layer) for layer in load(file.path)[1]]
    return tuple(
        (basis(key, allotment.key[i]), basis(value, allotment.value[i]))
        for i, (key, value) in enumerate(pairs)
    )


@lru_cache(maxsize=8)
def _allotted(policy: Ranked, file: Stamp) -> Allotment:
    return policy.allot(load(file.path)[1])
