"""Pass a model's queries, keys and values to a collector, layer by layer, storing nothing."""

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from kv_policy import CacheShape, Collector
from kv_transformers.fold import folded_by
from kv_transformers.layers import stored_layers
from kv_transformers.modules import attention_modules
from kv_transformers.pass_columns import PassColumns
from kv_transformers.softmax import Softmax
from kv_transformers.support import OUTPUT, UnsupportedModelError
from kv_transformers.watching import EmptyCache


class CollectingCache(EmptyCache):
    """A cache that passes vectors to a collector, such as a calibrator, and stores nothing.

    Use it as the cache of forward passes of whole texts. A pass attends only to its own tokens.
    """

    def __init__(self, model: PreTrainedModel, collector: Collector) -> None:
        """Pass the vectors of `model` to `collector`.

        Raises:
            UnsupportedModelError: the model's attention is not supported.
            ValueError: the model's attention implementation cannot be set, or the model is folded.
        """
        _expect_own(model)
        self._collector = collector
        super().__init__(model)
        if self.reads_shared:
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers that read the keys and values of others, whose "
                "queries a calibration would have to collect, too; use a policy without calibration"
            )

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq Lq D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        softmax: Softmax,
        columns: PassColumns,
    ) -> Float[Tensor, "B Lq Hq Dv"]:
        """Pass the new tokens to the collector, then attend causally over them.

        Raises:
            ValueError: the model was folded in the meantime.
        """
        model = self.model
        if layer == 0 and model is not None:
            _expect_own(model)
        factor = softmax.scale * query.shape[-1] ** 0.5
        grouped = (query if factor == 1 else query * factor).unflatten(1, (key.shape[1], -1))
        there = None if columns.valid is None else columns.valid.expand(len(query), -1)
        self._collector.see(layer, grouped, key, value, there)
        return super().attend(layer, query, key, value, softmax, columns)


def _expect_own(model: PreTrainedModel) -> None:
    """Raise if a model is folded, as its values would be coordinates in a basis."""
    found = folded_by(model)
    if found is not None:
        raise ValueError(
            f"the model's projections are folded for {found.policy}, so its vectors are "
            "coordinates in a basis; restore the model before it is calibrated"
        )


def output_projections(
    model: PreTrainedModel, shape: CacheShape
) -> tuple[Float[Tensor, "hidden QD"], ...]:
    """Return the weights of the output projections of layers that a policy stores.

    Raises:
        UnsupportedModelError: a layer has no output projection, or one that is not a plain linear
            layer with floating-point weights of 16 bits or more, or several attention modules of
            which none is clearly its own. The message names the layer.
        ValueError: the model is folded.
    """
    _expect_own(model)
    if shape.value_in_key:
        raise UnsupportedModelError(
            f"{type(model).__name__} has latent attention (MLA), whose output projection reads the "
            "values that heads expand from a latent, not what is stored; values cannot be paired "
            "with it"
        )
    layers = stored_layers(model)
    modules = attention_modules(model, layers)
    columns = shape.kv_heads * shape.group * shape.value_dim
    weights = []
    for layer in layers:
        name, module = modules.get(layer, ("", None))
        children = {} if module is None else dict(module.named_children())
        child = next((each for each in OUTPUT if each in children), None)
        if child is None:
            holder = "unnamed" if module is None else f"{name} ({type(module).__name__})"
            raise UnsupportedModelError(
                f"layer {layer} of {type(model).__name__}, {holder}, has no output projection "
                f"called {', '.join(OUTPUT[:-1])} or {OUTPUT[-1]}; values cannot be paired with it"
            )
        weights.append(_weight(f"{name}.{child}", children[child], columns))
    return tuple(weights)


def _weight(name: str, module: nn.Module, columns: int) -> Float[Tensor, "hidden QD"]:
    """Return the weights of a projection; raise if it is not a plain linear layer."""
    weight = getattr(module, "weight", None)
    plain = (
        isinstance(module, nn.Linear)
        and isinstance(weight, Tensor)
        and type(weight.data) is Tensor  # quantizers may use a tensor subclass
        and weight.is_floating_point()
        and weight.itemsize >= 2
    )
    if not plain:
        kind = f" of {weight.dtype}" if isinstance(weight, Tensor) else ""
        raise UnsupportedModelError(
            f"{name} is a {type(module).__name__}{kind}; calibration reads output projections that "
            "are plain nn.Linear layers with floating-point weights of 16 bits or more, so load "
            "the model unquantized"
        )
    assert isinstance(weight, Tensor)
    if weight.shape[1] != columns:
        raise UnsupportedModelError(
            f"{name} has {weight.shape[1]} input features, but the heads have {columns} outputs"
        )
    return weight.detach()
