"""Base of policies fitted to a file of statistics."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from kv_policy import (
    Basis,
    Budget,
    CacheShape,
    HeadBasis,
    LayerBasis,
    NotCalibratedError,
    Part,
)
from kv_svd.file import Facts, load_facts


@dataclass(frozen=True)
class Fitted(Part, ABC):
    """A policy that supplies a basis, fitted to statistics from `kv-serve calibrate zack`."""

    amounts: ClassVar[tuple[str, ...]] = ("rate", "removal")
    amount_of: ClassVar[str] = "dimensions"

    file: Annotated[str, Meta(min_length=1, description="output of kv-serve calibrate zack")]

    def __post_init__(self) -> None:
        """Check the parameters and that the file exists.

        Raises:
            NotCalibratedError: the file does not exist.
            ValueError: a parameter is refused, or the file is damaged or has another format.
        """
        super().__post_init__()
        expect_file(self.name, self.file)

    @classmethod
    def keeping(cls, share: Budget) -> dict[str, Any]:
        """Return the rate that keeps a share of the dimensions."""
        return {"rate": float((100 - Decimal(repr(share.amount))) / 100)}

    @property
    def path(self) -> Path:
        """Path of the statistics."""
        return Path(self.file)

    @property
    def facts(self) -> Facts:
        """Header of the statistics file."""
        return load_facts(self.path)

    @property
    def basis(self) -> Basis:
        """This policy."""
        return self

    @property
    def fitted_to(self) -> str:
        """Fingerprint of the calibrated model."""
        return self.facts.fingerprint

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        """Return the maps of one layer, restricted to the heads of `shape`.

        Raises:
            ValueError: layers, heads or dimensions differ from the calibrated model, or the heads
                split a group that is stored together.
        """
        expect_fits(self.name, self.file, self.facts, layer, shape)
        key, value = self.maps(layer)
        heads = slice(shape.first_head, shape.first_head + shape.kv_heads)
        return LayerBasis(
            None if key is None else cut(key, heads, self.name),
            None if value is None else cut(value, heads, self.name),
        )

    @abstractmethod
    def maps(self, layer: int) -> tuple[HeadBasis | None, HeadBasis | None]:
        """Return the maps of a layer's keys and values, for all heads; None: unprojected."""


def expect_file(name: str, file: str) -> None:
    """Raise if a policy's file of statistics cannot be read.

    Raises:
        NotCalibratedError: it does not exist.
        ValueError: it is damaged or has another format.
    """
    try:
        load_facts(Path(file))
    except FileNotFoundError:
        raise NotCalibratedError(name, file, "zack") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def expect_fits(name: str, file: str, facts: Facts, layer: int, shape: CacheShape) -> None:
    """Raise if a layer of a cache is not one of the model that a file is of.

    Raises:
        ValueError: layers, heads or dimensions differ.
    """
    for what, here, fitted in (
        ("layers", shape.layers, facts.layers),
        ("query heads for each KV head", shape.group, facts.group),
        ("dimensions in a key", shape.key_dim, facts.key_dim),
        ("dimensions in a value", shape.value_dim, facts.value_dim),
    ):
        if here != fitted:
            raise ValueError(
                f"{name}: {file} is of a model with {fitted} {what}, but this cache has {here}; "
                "calibrate its own model"
            )
    last = shape.first_head + shape.kv_heads - 1
    if last >= facts.heads:
        raise ValueError(
            f"{name}: {file} is of a model with {facts.heads} KV heads, but this cache has heads "
            f"{shape.first_head} to {last}; calibrate its own model"
        )
    if not 0 <= layer < facts.layers:
        raise ValueError(f"{name}: layer {layer} not found; {file} has {facts.layers}, from 0")


def cut(maps: HeadBasis, heads: slice, name: str) -> HeadBasis:
    """Return the maps of some heads, which must not split a group stored together."""
    together = maps.together
    if heads.start % together or heads.stop % together:
        raise ValueError(
            f"{name}: {together} heads are stored together, and heads {heads.start} to "
            f"{heads.stop - 1} split such a group; use a number of devices that keeps groups "
            "whole, or fewer heads together"
        )
    return HeadBasis(
        maps.matrix[heads],
        maps.rank[heads.start // together : heads.stop // together],
        None if maps.dual is None else maps.dual[heads],
        together,
        None if maps.shift is None else maps.shift[heads],
    )
