"""What the policies of this package share: they are fitted to statistics in a file."""

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
    """A policy that is a basis, found from the statistics that `kv-serve calibrate zack` wrote."""

    amounts: ClassVar[tuple[str, ...]] = ("rate", "removal")
    amount_of: ClassVar[str] = "dimensions"

    file: Annotated[str, Meta(min_length=1, description="what kv-serve calibrate zack wrote")]

    def __post_init__(self) -> None:
        """Check the parameters, and that there is such a file.

        Raises:
            NotCalibratedError: there is no such file.
            ValueError: a parameter is refused, or the file is damaged or of another kind.
        """
        super().__post_init__()
        try:
            load_facts(self.path)
        except FileNotFoundError:
            raise NotCalibratedError(self.name, self.file, "zack") from None
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @classmethod
    def keeping(cls, share: Budget) -> dict[str, Any]:
        """Keep a share of the dimensions: what is left of 100% is the rate."""
        return {"rate": float((100 - Decimal(repr(share.amount))) / 100)}

    @property
    def path(self) -> Path:
        """Where the statistics are."""
        return Path(self.file)

    @property
    def facts(self) -> Facts:
        """What the file tells of its model and its text."""
        return load_facts(self.path)

    @property
    def basis(self) -> Basis:
        """This policy is a basis."""
        return self

    @property
    def fitted_to(self) -> str:
        """Fingerprint of the model that was calibrated."""
        return self.facts.fingerprint

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        """Give the maps of one layer, cut to the heads of `shape`.

        Raises:
            ValueError: the shape has other layers, heads or dimensions than the model that was
                calibrated, or its heads are not whole groups of those that are stored together.
        """
        self._expect(layer, shape)
        key, value = self.maps(layer)
        heads = slice(shape.first_head, shape.first_head + shape.kv_heads)
        return LayerBasis(
            None if key is None else _cut(key, heads, self.name),
            None if value is None else _cut(value, heads, self.name),
        )

    @abstractmethod
    def maps(self, layer: int) -> tuple[HeadBasis | None, HeadBasis | None]:
        """The maps of a layer's keys and values, for all heads of the model; None: none."""

    def _expect(self, layer: int, shape: CacheShape) -> None:
        facts = self.facts
        for what, here, fitted in (
            ("layers", shape.layers, facts.layers),
            ("query heads for each KV head", shape.group, facts.group),
            ("dimensions in a key", shape.key_dim, facts.key_dim),
            ("dimensions in a value", shape.value_dim, facts.value_dim),
        ):
            if here != fitted:
                raise ValueError(
                    f"{self.name}: {self.file} is of a model with {fitted} {what}, and this cache "
                    f"has {here}; calibrate for its model"
                )
        last = shape.first_head + shape.kv_heads - 1
        if last >= facts.heads:
            raise ValueError(
                f"{self.name}: {self.file} is of a model with {facts.heads} KV heads, and this "
                f"cache holds heads {shape.first_head} to {last}; calibrate for its model"
            )
        if not 0 <= layer < facts.layers:
            raise ValueError(
                f"{self.name}: there is no layer {layer}; {self.file} has {facts.layers}, from 0"
            )


def _cut(maps: HeadBasis, heads: slice, name: str) -> HeadBasis:
    """The maps of some heads, which must be whole groups of those stored together."""
    together = maps.together
    if heads.start % together or heads.stop % together:
        raise ValueError(
            f"{name}: {together} heads are stored together, and heads {heads.start} to "
            f"{heads.stop - 1} are no whole groups of them; use as many devices as leave groups "
            "whole, or fewer heads together"
        )
    return HeadBasis(
        maps.matrix[heads],
        maps.rank[heads.start // together : heads.stop // together],
        None if maps.dual is None else maps.dual[heads],
        together,
    )
