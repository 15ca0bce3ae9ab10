"""Palu: low-rank latents shared by groups of heads."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from kv_policy import Capabilities
from kv_svd.fit import Directions, rotation
from kv_svd.ranked import Ranked
from kv_svd.statistics import LayerStatistics


@dataclass(frozen=True)
class Palu(Ranked):
    """Store one latent vector for several KV heads, so their common part is stored once.

    The paper factors a projection W with a whitening S Sᵀ = E[x xᵀ] of its inputs. The left
    singular vectors of W S are the eigenvectors of W S Sᵀ Wᵀ = E[(W x)(W x)ᵀ], the second moments
    of the outputs, so statistics of a group's concatenated keys, or values, are sufficient.

    This implementation differs from the paper in two ways: keys are taken after RoPE, where the
    paper factors them before it and reconstructs them at every step, and ranks are chosen by
    singular values, where the paper uses Fisher information.
    """

    name: ClassVar[str] = "palu"
    source: ClassVar[str] = "Palu, Chang et al., 2024, https://arxiv.org/abs/2407.21118"

    together: Annotated[int, Meta(ge=1, description="KV heads that share one latent")] = 4

    def __post_init__(self) -> None:
        """Check that the file has statistics of as many concatenated heads.

        Raises:
            ValueError: see the base class, or the file has another number of heads together.
        """
        super().__post_init__()
        if self.facts.together % self.together:
            raise ValueError(
                f"palu: together={self.together} needs statistics of so many concatenated heads, "
                f"but {self.file} was calibrated with {self.facts.together}; calibrate with "
                f"--together {self.together}"
            )

    @property
    def capabilities(self) -> Capabilities:
        """Heads can be sharded only if groups are kept whole."""
        return Capabilities(splits_heads=self.together == 1)

    @property
    def joined(self) -> int:
        """KV heads that share one latent."""
        return self.together

    def directions(self, layer: LayerStatistics) -> tuple[Directions, Directions]:
        """Return the right singular vectors of a group's concatenated keys, and of its values."""
        parts = layer.together // self.together
        key, value = layer.key.blocks(parts), layer.value.blocks(parts)
        return rotation(key, self.together), rotation(value, self.together)
