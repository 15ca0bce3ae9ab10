"""KQ-SVD: the pair of maps with the least error in the attention logits."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from kv_svd.fit import Directions, Moments, positive
from kv_svd.ranked import Ranked
from kv_svd.statistics import LayerStatistics

_FLOOR = 1e-8  # of a moment's greatest eigenvalue; smaller ones are raised to it
_LEAST = 1e-12  # of a head's greatest singular value; lower limit for coordinate scales


@dataclass(frozen=True)
class KqSvd(Ranked):
    """Map keys by A and queries by B to minimize E|q·k - (q B)·(k A)|² for each rank.

    With second moments M_q and M_k, that error is |M_q^½ (I - B Aᵀ) M_k^½|², so the best product of
    rank r is the truncated SVD of M_q^½ M_k^½ = U S Vᵀ: A = M_k^-½ V_r and B = M_k^½ V_r. No
    rotation shared by both, such as that of `zack`, has a smaller error. Values and the output
    projection are treated alike. The maps are not orthonormal: queries and outputs use the dual.

    Coordinate j of a key is scaled by the root of its singular value s_j, that of a query by the
    inverse. Both are then uncorrelated, with variances s_j per token. If the quantization step is
    proportional to a token's root mean square, rounding adds an error proportional to
    (Σ c_j²)(Σ s_j² / c_j²) for scales c, which by Cauchy-Schwarz is least for c_j² = s_j. With a
    quantization step per channel the scale has no effect.
    """

    name: ClassVar[str] = "kq-svd"
    source: ClassVar[str] = (
        "Eckart-Young for q·k, as in KQ-SVD, Lesens et al., 2025, https://arxiv.org/abs/2512.05916"
    )

    def directions(self, layer: LayerStatistics) -> tuple[Directions, Directions]:
        """Return the best pairs for queries and keys, and for the output projection and values."""
        return best_pair(layer.query, layer.keys), best_pair(layer.output, layer.values)


def best_pair(asking: Moments, stored: Moments) -> Directions:
    """Return the pair of maps whose truncation least changes the products of two kinds of vectors.

    Eigenvalues of moments below 1e-8 of the greatest are raised to that, so that all directions
    together remain the identity where the samples do not span the space.

    Args:
        asking: moments of the vectors multiplied with the stored ones, such as queries.
        stored: moments of the stored vectors, such as keys.

    Raises:
        ValueError: one of the two has no samples.
    """
    if not (asking.rows and stored.rows):
        raise ValueError("a basis cannot be fitted without samples; add some tokens first")
    root, inverse = _roots(stored.total / stored.rows)
    other, _ = _roots(asking.total / asking.rows)
    _, singular, right = torch.linalg.svd(other @ root)
    columns = right.mT * positive(right.mT)
    least = (singular[:, :1] * _LEAST).clamp(min=torch.finfo(singular.dtype).tiny)
    scale = singular.maximum(least).sqrt()[:, None]
    return Directions(inverse @ columns * scale, singular, root @ columns / scale)


def _roots(
    mean: Float64[Tensor, "H D D"],
) -> tuple[Float64[Tensor, "H D D"], Float64[Tensor, "H D D"]]:
    """Return the square root of positive matrices, and its inverse."""
    values, vectors = torch.linalg.eigh(mean)
    greatest = values[:, -1:]
    floor = torch.where(greatest > 0, greatest * _FLOOR, torch.ones_like(greatest))
    root = values.maximum(floor).sqrt()[:, None]
    return vectors * root @ vectors.mT, vectors / root @ vectors.mT
