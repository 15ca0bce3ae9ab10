"""A calibrator receives the vectors that the model attends with."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from kv_policy import Calibrator, load_calibrator
from kv_transformers.cache_argument import passing
from kv_transformers.collecting import CollectingCache, output_projections
from kv_transformers.fold import Fold
from kv_transformers.support import UnsupportedModelError, cache_shape
from tiered_policies import Turned

SEPARATE, HEADS, GROUP, DIM = ("llama", "mistral", "qwen2"), 2, 3, 8


def started(model: PreTrainedModel, together: int = 1) -> Calibrator:
    shape = cache_shape(model)
    return load_calibrator("zack")(shape, output_projections(model, shape), together)


def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def by_hand(model: PreTrainedModel, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return queries, keys and values of all layers, from the projections, rotated here."""
    given: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, inputs, out: given.setdefault(name, []).append(out)

    hooks = [
        module.register_forward_hook(keep(name.rsplit(".", 1)[-1]))
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj", "v_proj", "qkv_proj"))
    ]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    if "qkv_proj" in given:
        sizes = [HEADS * GROUP * DIM, HEADS * DIM, HEADS * DIM]
        pieces = [out.split(sizes, -1) for out in given["qkv_proj"]]
    else:
        pieces = list(zip(given["q_proj"], given["k_proj"], given["v_proj"], strict=True))
    angle = torch.arange(ids.shape[1])[:, None] * model.model.rotary_emb.inv_freq
    cos, sin = angle.cos(), angle.sin()

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, DIM)).transpose(1, 2)

    return [(turned(heads(q)), turned(heads(k)), heads(v)) for q, k, v in pieces]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "phi3"])
@pytest.mark.parametrize("together", [1, 2])
@torch.no_grad()
def test_moments_are_those_of_the_vectors_after_rope(make, name: str, together: int) -> None:
    model = with_biases(make(name))
    ids = torch.randint(3, 101, (2, 40))
    expected = by_hand(model, ids)
    calibrator = started(model, together)
    cache = CollectingCache(model, calibrator)
    model.base_model(input_ids=ids, **passing(model.base_model, cache), use_cache=True)
    assert calibrator.tokens == 80
    state = calibrator.state()
    for i, (q, k, v) in enumerate(expected):
        q = q.double().unflatten(1, (HEADS, GROUP)).movedim(1, 0).flatten(1, 3)
        torch.testing.assert_close(state["query"][i], q.mT @ q, rtol=1e-5, atol=1e-5)
        for kind, x in (("key", k), ("value", v)):
            rows = x.double().movedim(1, 0)  # heads, sequences, tokens, dimensions
            joined = rows.unflatten(0, (-1, together)).movedim(1, 3).flatten(3).flatten(1, 2)
            torch.testing.assert_close(state[kind][i], joined.mT @ joined, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
@torch.no_grad()
def test_the_model_computes_what_it_always_does(make, name: str) -> None:
    model = make(name)
    for layer in model.model.layers:
        layer.self_attn.scaling = 1.3  # as in models that do not divide by the root of D
    ids = torch.randint(3, 101, (2, 40))
    expected = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    cache = CollectingCache(model, started(model))
    for _ in range(2):  # a pass stores nothing
        out = model.base_model(input_ids=ids, **passing(model.base_model, cache), use_cache=True)
        torch.testing.assert_close(out.last_hidden_state, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_padding_is_left_out(make, batch) -> None:
    model = make()
    inputs = batch((23, 9))
    mask = inputs["attention_mask"].bool()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded, apart = started(model), started(model)
    model.base_model(
        **inputs,
        position_ids=positions,
        **passing(model.base_model, CollectingCache(model, padded)),
        use_cache=True,
    )
    for ids, there in zip(inputs["input_ids"], mask, strict=True):
        alone = CollectingCache(model, apart)
        model.base_model(
            input_ids=ids[there][None], **passing(model.base_model, alone), use_cache=True
        )
    assert padded.tokens == apart.tokens == 23 + 9
    for name, tensor in padded.state().items():
        torch.testing.assert_close(tensor, apart.state()[name], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_bfloat16_is_added_up_in_float64(make) -> None:
    model = make("llama", torch.bfloat16)
    calibrator = started(model)
    ids = torch.randint(3, 101, (1, 40))
    cache = CollectingCache(model, calibrator)
    model.base_model(input_ids=ids, **passing(model.base_model, cache), use_cache=True)
    assert calibrator.state()["key"].dtype == torch.float64


@torch.no_grad()
def test_a_model_that_is_not_finite_is_refused(make) -> None:
    model = make()
    model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.inf
    cache = CollectingCache(model, started(model))
    with pytest.raises(ValueError, match="layer 1: the key vectors contain an infinity or NaN"):
        model.base_model(
            input_ids=torch.randint(3, 101, (1, 40)),
            **passing(model.base_model, cache),
            use_cache=True,
        )


def test_a_folded_model_is_refused(make) -> None:
    """At full rank shapes match, so no other check would detect that values are coordinates."""
    model, ids = make(), torch.randint(3, 101, (1, 9))
    calibrator = started(model)
    before = CollectingCache(model, calibrator)
    sentence = "folded for turned.*; restore the model before it is calibrated"
    with Fold(model, Turned("8", "8")):
        with pytest.raises(ValueError, match=sentence):
            CollectingCache(model, calibrator)
        with pytest.raises(ValueError, match=sentence):
            output_projections(model, cache_shape(model))
        with torch.no_grad(), pytest.raises(ValueError, match=sentence):
            model.base_model(input_ids=ids, **passing(model.base_model, before), use_cache=True)
    assert calibrator.tokens == 0
    with torch.no_grad():
        model.base_model(input_ids=ids, **passing(model.base_model, before), use_cache=True)
    assert calibrator.tokens == 9


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
def test_output_projections_are_found_layer_by_layer(make, name: str) -> None:
    model = make(name)
    found = output_projections(model, cache_shape(model))
    assert len(found) == 3
    for layer, weight in zip(model.model.layers, found, strict=True):
        assert torch.equal(weight, layer.self_attn.o_proj.weight)
        assert not weight.requires_grad


class Quantized(nn.Linear):
    """A Linear with integer codes, as in quantization libraries."""

    def __init__(self) -> None:
        super().__init__(48, 48, bias=False)
        self.weight = nn.Parameter(torch.zeros(48, 48, dtype=torch.uint8), requires_grad=False)


class Wrapped(Tensor):
    """A tensor subclass of a quantizer."""


def replaced(make, layer: int, projection: nn.Module) -> PreTrainedModel:
    model = make()
    model.model.layers[layer].self_attn.o_proj = projection
    return model


def test_a_quantized_projection_is_refused_by_name(make) -> None:
    for model, kind in (
        (replaced(make, 1, Quantized()), "Quantized of torch.uint8"),
        (replaced(make, 1, nn.Linear(48, 48).to(torch.float8_e4m3fn)), "Linear of torch.float8"),
        (replaced(make, 1, nn.Sequential(nn.Linear(48, 48))), "Sequential"),
    ):
        with pytest.raises(UnsupportedModelError) as caught:
            output_projections(model, cache_shape(make()))
        assert f"layers.1.self_attn.o_proj is a {kind}" in str(caught.value)
    wrapped = make()
    o_proj = wrapped.model.layers[2].self_attn.o_proj
    o_proj.weight = nn.Parameter(o_proj.weight.data.as_subclass(Wrapped), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"layers.2.self_attn.o_proj is a Linear of"):
        output_projections(wrapped, cache_shape(make()))


def test_a_projection_of_other_sizes_is_refused(make) -> None:
    model = replaced(make, 0, nn.Linear(40, 48))
    with pytest.raises(
        UnsupportedModelError, match="o_proj has 40 input features, but the heads have"
    ):
        output_projections(model, cache_shape(make()))


def test_a_model_that_calls_it_something_else_is_refused() -> None:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 of GPT2.*GPT2Attention\), has no ou"):
        output_projections(model, cache_shape(model))


class Kept:
    """A collector that keeps what it is shown."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def see(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, there: Tensor | None = None
    ) -> None:
        self.logits.append(query @ key[:, :, None].mT / query.shape[-1] ** 0.5)


@torch.no_grad()
def test_queries_give_the_logits_of_a_model_with_its_own_scale(make) -> None:
    model = make("llama")
    ids = torch.randint(3, 101, (1, 20))

    def logits(factor: float) -> list[Tensor]:
        for layer in model.model.layers:
            layer.self_attn.scaling = factor * DIM**-0.5
        kept = Kept()
        cache = CollectingCache(model, kept)
        model.base_model(input_ids=ids, **passing(model.base_model, cache), use_cache=True)
        return kept.logits

    torch.testing.assert_close(logits(2.5)[0], 2.5 * logits(1.0)[0])
