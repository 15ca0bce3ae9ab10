"""The pair of maps that loses least of the attention logits."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from kv_svd.fit import Directions, Moments, positive
from kv_svd.ranked import Ranked
from kv_svd.statistics import LayerStatistics

_FLOOR = 1e-8  # of a moment's greatest eigenvalue, for those that are less
_LEAST = 1e-12  # of a head's greatest singular value, in the scale of its coordinates


@dataclass(frozen=True)
class KqSvd(Ranked):
    """Map keys by A and queries by B so that E|q·k - (q B)·(k A)|² is least for its rank.

    With second moments M_q and M_k, that error is |M_q^½ (I - B Aᵀ) M_k^½|², so the best product of
    rank r is the truncated SVD of M_q^½ M_k^½ = U S Vᵀ: A = M_k^-½ V_r and B = M_k^½ V_r. No
    rotation shared by both, such as that of `zack`, loses less. Values meet the output projection
    the same way. The maps are not orthonormal: what meets the stored vectors is mapped by the dual.

    Coordinate j of a key is scaled by the root of its singular value s_j, that of a query by the
    inverse. Both are then uncorrelated, with variances s_j per token. If a code's step goes with a
    token's root mean square, rounding adds an error in proportion to (Σ c_j²)(Σ s_j² / c_j²) for
    scales c, which by Cauchy-Schwarz is least for c_j² = s_j. To codes with a step per channel the
    scale makes no difference.
    """

    name: ClassVar[str] = "kq-svd"
    source: ClassVar[str] = (
        "Eckart-Young for q·k, as in KQ-SVD, Lesens et al., 2025, https://arxiv.org/abs/2512.05916"
    )

    def directions(self, layer: LayerStatistics) -> tuple[Directions, Directions]:
        """The best pairs for queries and keys, and for the output projection and values."""
        return best_pair(layer.query, layer.keys), best_pair(layer.output, layer.values)


def best_pair(asking: Moments, stored: Moments) -> Directions:
    """The pair of maps whose truncation loses least of the products of two kinds of vectors.

    Eigenvalues of moments below 1e-8 of the greatest count as that, so that all directions together
    are still the identity where the samples did not reach every one.

    Args:
        asking: moments of what meets the stored vectors, such as queries.
        stored: moments of those, such as keys.

    Raises:
        ValueError: there are no samples of one kind.
    """
    if not (asking.rows and stored.rows):
        raise ValueError("a basis cannot be fitted to no samples; add some tokens first")
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
    """The square root of positive matrices, and its inverse."""
    values, vectors = torch.linalg.eigh(mean)
    greatest = values[:, -1:]
    floor = torch.where(greatest > 0, greatest * _FLOOR, torch.ones_like(greatest))
    root = values.maximum(floor).sqrt()[:, None]
    return vectors * root @ vectors.mT, vectors / root @ vectors.mT
