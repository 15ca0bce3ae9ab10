"""Collection of what levels are fitted to, for `kv-serve calibrate levels`."""

from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from kv_policy import CacheShape, Calibrated, LevelError
from kv_quant.affine import clean
from kv_quant.fitted import BITS, placed
from kv_quant.integer import IntegerCodec
from kv_quant.level_file import Fit, FittedLevels, save
from kv_quant.level_fit import BINS, bin_sums, fitted_levels, squared_error
from kv_quant.outliers import OutlierCodec
from kv_quant.sensitivity import sensitivity

Kind: TypeAlias = Literal["keys", "values"]
KINDS: Final[tuple[Kind, ...]] = ("keys", "values")
_FINEST: Final = max(BITS)


class LevelCalibration:
    """Accumulates the elements of keys and values as their codec sees them, by their sensitivity.

    An element is a place in the range of its vector, whose outliers are apart. Its weight is the
    squared change of the attention outputs of its layer per squared error of the place, over the
    squared outputs: a first estimate of the relative error. KVQuant weights by squared gradients of
    the model's loss instead, which need a backward pass. Every layer and every pass counts the
    same. The weights of each kind are in equal bins, so memory does not grow with the tokens.

    Source: Hooper et al., 2024, KVQuant (https://arxiv.org/abs/2401.18079), section 3.3, with one
    table for the keys of all layers and one for their values, in place of one a layer.
    """

    def __init__(self, shape: CacheShape, outliers: tuple[int, ...] = (0, 1)) -> None:
        """Start with no tokens.

        Args:
            shape: the model's cache.
            outliers: numbers of elements of a vector that are kept apart; levels are fitted for
                each.

        Raises:
            ValueError: there are none, one is repeated or below 0, or values are stored in keys.
        """
        if not outliers or min(outliers) < 0 or len(set(outliers)) < len(outliers):
            raise ValueError(
                f"outliers are {outliers}; give one or more different numbers of 0 or more"
            )
        if shape.value_in_key:
            raise ValueError(
                "this model has latent attention (MLA), whose one vector per token is key and "
                "value; levels are fitted to each apart, so use levels=even with this model"
            )
        self.shape, self.outliers = shape, outliers
        self._sums: dict[str, Tensor] = {kind: _nothing(len(outliers)) for kind in KINDS}
        self._passes = torch.zeros(shape.layers, dtype=torch.int64)
        self._tokens = torch.zeros(shape.layers, dtype=torch.int64)

    @property
    def tokens(self) -> int:
        """Tokens accumulated in every layer."""
        return int(self._tokens.min())

    def see(
        self,
        layer: int,
        query: Float[Tensor, "B H G L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        there: Bool[Tensor, "B L"] | None = None,
    ) -> None:
        """Accumulate a layer's vectors of a pass, after RoPE.

        Raises:
            ValueError: there is padding, vectors contain an infinity or NaN, or all outputs are 0.
        """
        if there is not None and not bool(there.all()):
            raise ValueError(f"layer {layer}: a pass of a calibration has no padding")
        found = sensitivity(query.float(), key.float(), value.float())
        if not 0 < found.output < torch.inf:
            raise ValueError(
                f"layer {layer}: the squared outputs of attention add up to {found.output}; keys "
                "or values contain an infinity or NaN, or all values are 0"
            )
        by = {"keys": found.key, "values": found.value[..., None].expand(value.shape)}
        for kind, x in (("keys", key), ("values", value)):
            weight = by[kind].double() / found.output
            for i, count in enumerate(self.outliers):
                self._sums[kind][i] += self._binned(x, weight, count)
        self._passes[layer] += 1
        self._tokens[layer] += key.shape[0] * key.shape[2]

    def _binned(
        self, x: Float[Tensor, "B H L D"], weight: Float64[Tensor, "B H L D"], outliers: int
    ) -> Float64[Tensor, "3 bins"]:
        dim = x.shape[-1]
        rows, weight = clean(x.reshape(-1, dim)), weight.reshape(-1, dim)
        if count := min(outliers, dim - 1):
            rows, apart, _ = OutlierCodec(IntegerCodec(dim, _FINEST), count).split(rows)
            weight = weight.scatter(1, apart, 0.0)  # they have no level
        place, scale, _ = placed(rows, _FINEST)  # the ranges of other widths are rounded alike
        top = 2**_FINEST - 1
        weight = weight * (scale.double() * top).square()  # of errors in units of the range
        place = (place.double() / top).clamp(0, 1)  # float32 may round beyond
        return bin_sums(place.flatten().cpu(), weight.flatten().cpu())

    def state(self) -> dict[str, Tensor]:
        """Return the accumulated weights and counts."""
        found = {kind: each.clone() for kind, each in self._sums.items()}
        return found | {"passes": self._passes.clone(), "tokens": self._tokens.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a state; the results are bitwise those of an uninterrupted run.

        Raises:
            ValueError: the state belongs to another model, or is for other outliers.
        """
        mine = {name: (x.shape, x.dtype) for name, x in self.state().items()}
        if {name: (x.shape, x.dtype) for name, x in state.items()} != mine:
            raise ValueError(
                "the state is of a model with other sizes, or for other outliers; start over"
            )
        self._sums = {kind: state[kind].clone() for kind in KINDS}
        self._passes, self._tokens = state["passes"].clone(), state["tokens"].clone()

    def fits(self) -> tuple[Fit, ...]:
        """Return the levels for codes of 4, 3, 2 and 1 bits, beside each number of outliers.

        Raises:
            ValueError: no tokens were accumulated, or some layers have more than others.
        """
        self._expect_whole()
        counts, found = tuple(2**bits for bits in BITS), []
        for i, outliers in enumerate(self.outliers):
            of = {kind: fitted_levels(self._sums[kind][i], counts) for kind in KINDS}
            for bits in BITS:
                keys, values = (_in_steps(of[kind][2**bits]) for kind in KINDS)
                found.append(Fit(bits=bits, outliers=outliers, keys=keys, values=values))
        return tuple(found)

    def errors(self) -> tuple[LevelError, ...]:
        """Estimate the relative errors of attention outputs by the levels of each fit.

        They are to first order, and roots of the mean squares over layers and passes.

        Raises:
            ValueError: as `fits`.
        """
        found = []
        for fit in self.fits():
            even = tuple(float(level) for level in range(2**fit.bits))
            each = (("keys", fit.keys), ("values", fit.values), ("keys", even), ("values", even))
            errors = (self._error(kind, fit.outliers, levels) for kind, levels in each)
            found.append(LevelError(fit.bits, fit.outliers, *errors))
        return tuple(found)

    def _error(self, kind: str, outliers: int, levels: tuple[float, ...]) -> float:
        sums = self._sums[kind][self.outliers.index(outliers)]
        top = len(levels) - 1
        lost = squared_error(sums, tuple(level / top for level in levels))
        return sqrt(lost / int(self._passes.sum()))

    def write(self, path: Path, facts: Calibrated) -> None:
        """Write the levels atomically.

        Raises:
            ValueError: as `fits`.
            OSError: writing failed; an existing file is unchanged.
        """
        levels = FittedLevels(
            model=facts.model,
            fingerprint=facts.fingerprint,
            text=facts.text,
            digest=facts.digest,
            tokens=self.tokens,
            fits=self.fits(),
        )
        save(path, levels)

    def _expect_whole(self) -> None:
        least, most = int(self._passes.min()), int(self._passes.max())
        if least == 0 or least != most:
            raise ValueError(
                f"layers have seen from {least} to {most} passes; feed all layers the same passes "
                "first"
            )


def _nothing(outliers: int) -> Float64[Tensor, "C 3 bins"]:
    return torch.zeros(outliers, 3, BINS, dtype=torch.float64)


def _in_steps(levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return levels from 0 to 1 in units of the scale, of which the range has as many less 1."""
    return tuple(round(level * (len(levels) - 1), 6) for level in levels)
