"""Which code computes the scores of a gate: that of a backend on its device, or torch."""

from importlib import import_module
from typing import Protocol, cast, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from kv_policy import LayerView
from kv_policy.backends import installed_backends


@runtime_checkable
class GateKernels(Protocol):
    """What a module named by `kv_policy.Backend.token_scores` implements for a gate."""

    def declined(self, view: LayerView, units: int) -> str | None:
        """Return why it does not compute the scores of a view; None if it does."""
        ...

    def gate(
        self,
        view: LayerView,
        linear: Float[Tensor, "N M F"],
        inner: Float[Tensor, "N M F U"],
        outer: Float[Tensor, "N M U"],
    ) -> Float[Tensor, "B H L"]:
        """Return the logarithm of the score of each token in view, in float32.

        It is w · x + sum over units of outer · max(0, inner · x), where x are the features of
        `gate_features.features`, in float32. A key is rotated back by its position, which float32
        multiplies by the frequencies; in an empty slot it is not rotated. Weights are those of all
        layers and of the model's M heads, in float32; the view's first head is `shape.first_head`.
        """
        ...


def kernels_of(view: LayerView, units: int) -> GateKernels | None:
    """Return the code of a backend that computes the scores of a view; None: torch does."""
    assert view.keys is not None
    device = view.keys.device.type
    for each in installed_backends().values():
        if not (each.preferred and each.token_scores and each.supports(device)):
            continue
        if each.missing() is None:
            kernels = cast(GateKernels, import_module(each.token_scores))  # a module of functions
            if kernels.declined(view, units) is None:
                return kernels
    return None
