"""What calibrations of this package have in common."""

from jaxtyping import Bool
from torch import Tensor


def expect_no_padding(layer: int, there: Bool[Tensor, "B L"] | None) -> None:
    """Raise if a pass has padding, whose columns `there` does not mark.

    Raises:
        ValueError: it has; the message names the layer.
    """
    if there is not None and not bool(there.all()):
        raise ValueError(f"layer {layer}: a pass of a calibration has no padding")
