"""Bases folded into models' projections, compared with the same caches without folding."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BitNetConfig,
    DynamicCache,
    OlmoConfig,
    OPTConfig,
    OPTForCausalLM,
)

from kv_policy import CacheShape, LayerBasis, compose, parse
from kv_transformers import uninstall
from kv_transformers.cache import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.fold import Fold, folded_by
from kv_transformers.folded import FoldedLinear
from kv_transformers.support import UnsupportedModelError
from rotated import Wide
from small_sizes import SIZES
from tiered_policies import Turned

FULL = Turned("8", "8")
RAGGED = Turned("8365", "2745")


def logits(model, cache, ids, mask=None):
    """Return the logits of a prompt and of three decode steps."""
    found = []
    with torch.no_grad():
        for part in (ids[:, :-3], *ids[:, -3:].split(1, 1)):
            columns = cache.get_seq_length() + part.shape[1]
            seen = None if mask is None else mask[:, :columns]
            found.append(model(part, **passing(model, cache), attention_mask=seen).logits[:, -1])
    return torch.stack(found)


def opt():
    torch.manual_seed(5)
    config = OPTConfig(
        vocab_size=101,
        hidden_size=48,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        word_embed_proj_dim=48,
    )
    model = OPTForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            nn.init.normal_(parameter)  # they are zero at first
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_at_full_rank_folding_changes_nothing_but_rounding(make, batch, name: str) -> None:
    model = make(name)
    if name == "qwen2":
        for layer in model.model.layers:
            nn.init.normal_(layer.self_attn.v_proj.bias)  # zero at first
    policy = Wide()
    inputs = batch((23, 9))
    want = logits(model, DynamicCache(), *inputs.values())
    with Fold(model, policy):
        found = logits(model, CompressedCache(model, policy), *inputs.values())
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    again = logits(model, DynamicCache(), *inputs.values())
    assert torch.equal(again, want)


@pytest.mark.parametrize(
    "policy",
    [
        RAGGED,
        Turned("4", "4", paired=True),
        Turned("95", "37", together=2),
        compose(RAGGED, parse("kv-compress:budget=12,window=4,recent=4,every=2")),
        compose(RAGGED, parse("k8v4")),
        compose(RAGGED, parse("leankv:window=4")),
    ],
    ids=str,
)
def test_folded_is_what_is_undone_otherwise(make, batch, policy) -> None:
    model, inputs = make(), batch((23, 9))
    plain = CompressedCache(model, policy)
    want = logits(model, plain, *inputs.values())
    with Fold(model, policy):
        folded = CompressedCache(model, policy)
        found = logits(model, folded, *inputs.values())
    # Rounding may change integer codes by one step.
    atol = 1e-5 if policy.formats is None else 0.05
    torch.testing.assert_close(found, want, rtol=1e-3, atol=atol)
    mine, theirs = folded.memory(), plain.memory()
    assert mine.vector_bytes == theirs.vector_bytes
    assert mine.basis_bytes < theirs.basis_bytes  # values need no maps when folded


def test_projections_are_really_smaller(make) -> None:
    model = make()
    before = sum(p.numel() for p in model.parameters())
    old = [layer.self_attn.v_proj for layer in model.model.layers]
    fold = Fold(model, RAGGED)
    ranks = [sum(p.rank) for p in fold.state.packing]
    assert ranks == [9, 9, 9]  # of 16
    for layer in model.model.layers:
        attention = layer.self_attn
        assert attention.v_proj.out_features == 16  # whole heads of 8
        assert attention.o_proj.in_features == 3 * 9
        assert isinstance(attention.o_proj, FoldedLinear)
    assert sum(p.numel() for p in model.parameters()) < before
    assert folded_by(model) is fold.state
    fold.restore()
    assert [layer.self_attn.v_proj for layer in model.model.layers] == old
    assert folded_by(model) is None
    fold.restore()  # a second restore is harmless


@pytest.mark.parametrize(
    "basis", [FULL, RAGGED, Turned("43", "5", paired=True), Turned("4", "5")], ids=str
)
def test_without_rotary_embedding_queries_and_keys_are_folded_too(basis: Turned) -> None:
    model = opt()
    ids = torch.randint(3, 101, (2, 19))
    full = logits(model, DynamicCache(), ids)
    want = logits(model, CompressedCache(model, basis), ids)
    with Fold(model, basis) as fold:
        assert fold.state.what == {"keys", "values"}
        cache = CompressedCache(model, basis)
        found = logits(model, cache, ids)
        assert cache.memory().basis_bytes == 0
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    if basis == FULL:
        torch.testing.assert_close(found, full, rtol=1e-4, atol=1e-5)


def test_a_folded_model_serves_caches_of_its_basis_only(make) -> None:
    model, ids = make(), torch.randint(3, 101, (1, 9))
    before = CompressedCache(model, RAGGED)
    with Fold(model, RAGGED):
        with pytest.raises(ValueError, match=r"folded for turned.* but k8v4 stores vectors"):
            CompressedCache(model, "k8v4")
        with pytest.raises(ValueError, match="pass a CompressedCache of that policy"):
            model(ids, **passing(model, DynamicCache()))
        with pytest.raises(ValueError, match="pass a CompressedCache of that policy"):
            model(ids)
        with pytest.raises(ValueError, match="the model is folded already"):
            Fold(model, RAGGED)
        with torch.no_grad(), pytest.raises(RuntimeError, match="folded or restored since"):
            model(ids, **passing(model, before))
        within = CompressedCache(model, RAGGED)
        with torch.no_grad():
            model(ids, **passing(model, within))
    with torch.no_grad(), pytest.raises(RuntimeError, match="folded or restored since"):
        model(ids, **passing(model, within))


def test_another_attention_implementation_does_not_go_wrong_silently(make) -> None:
    model, ids = make(), torch.randint(3, 101, (1, 9))
    with Fold(model, RAGGED):
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="pass a CompressedCache of that policy"):
            model(ids)
        model.set_attn_implementation("sdpa")  # test models share a configuration


def test_a_folded_model_keeps_its_hooks(make) -> None:
    model = make()
    with Fold(model, RAGGED), pytest.raises(ValueError, match="restore the model first"):
        uninstall(model)


def test_tied_projections_stay_tied(make) -> None:
    """Folding replaces layers instead of changing them, so shared projections are unaffected."""
    model, inputs = make(), torch.randint(3, 101, (1, 19))
    layers = model.model.layers
    layers[1].self_attn.o_proj = layers[0].self_attn.o_proj
    want = logits(model, CompressedCache(model, RAGGED), inputs)
    with Fold(model, RAGGED):
        assert layers[1].self_attn.o_proj is not layers[0].self_attn.o_proj
        found = logits(model, CompressedCache(model, RAGGED), inputs)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert layers[1].self_attn.o_proj is layers[0].self_attn.o_proj


def test_what_cannot_be_folded_is_refused_and_nothing_changes(make) -> None:
    class Quantized(nn.Linear):
        pass

    with pytest.raises(UnsupportedModelError, match="no projections called v_proj and o_proj"):
        Fold(make("phi3"), Wide())
    model = make()
    attention = model.model.layers[2].self_attn
    old, new = attention.o_proj, Quantized(48, 48)
    attention.o_proj = new
    with pytest.raises(UnsupportedModelError, match="o_proj of layer 2 is a Quantized"):
        Fold(model, RAGGED)
    assert attention.o_proj is new
    assert folded_by(model) is None
    attention.o_proj = old
    with pytest.raises(ValueError, match="k8v4 has no basis to fold"):
        Fold(model, "k8v4")
    with pytest.raises(ValueError, match="stores 2 KV heads together, which cannot be folded"):
        Fold(opt(), Turned("9", "9", together=2))


def test_of_a_basis_that_shifts_keys_only_values_are_folded(make) -> None:
    basis, ids = Turned("8", "8", shifted=True), torch.randint(3, 101, (2, 19))
    model = make()
    full = logits(model, DynamicCache(), ids)
    torch.testing.assert_close(
        logits(model, CompressedCache(model, basis), ids), full, rtol=1e-4, atol=1e-5
    )
    with Fold(model, basis) as fold:
        assert fold.state.what == {"values"}
        found = logits(model, CompressedCache(model, basis), ids)
    torch.testing.assert_close(found, full, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="subtracts the mean key of each head, which is not"):
        Fold(opt(), basis)


@pytest.mark.parametrize("what", ["a soft cap", "attention sinks"])
def test_shifted_keys_that_change_attention_are_refused_with_the_cache(
    make, what, monkeypatch
) -> None:
    model = make()
    if what == "a soft cap":
        monkeypatch.setattr(model.config, "attn_logit_softcapping", 30.0, raising=False)
    else:
        model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(6))
    with pytest.raises(UnsupportedModelError, match=f"subtracts the mean key .* have {what}"):
        CompressedCache(model, Turned("8", "8", shifted=True))
    CompressedCache(model, Turned("8", "8"))


def test_keys_alone_cannot_be_folded_behind_a_rotary_embedding(make) -> None:
    class KeysOnly(Turned):
        def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
            return LayerBasis(key=super().bind(layer, shape).key)

    model, ids = make(), torch.randint(3, 101, (1, 19))
    with pytest.raises(ValueError, match="keys only, which a rotary embedding keeps from being"):
        Fold(model, KeysOnly("8"))
    full = logits(model, DynamicCache(), ids)
    found = logits(model, CompressedCache(model, KeysOnly("8")), ids)
    torch.testing.assert_close(found, full, rtol=1e-4, atol=1e-5)


def test_a_folded_model_generates(make, batch) -> None:
    model, inputs = make(), batch((12, 7))
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    want = model.generate(**inputs, **passing(model, CompressedCache(model, RAGGED)), **options)
    with Fold(model, RAGGED):
        found = model.generate(
            **inputs, **passing(model, CompressedCache(model, RAGGED)), **options
        )
    assert torch.equal(found, want)


def between(config):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "sub_norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)  # they are 1 at first
    return model


@pytest.mark.parametrize("basis", [Wide(), RAGGED], ids=["full rank", "ragged"])
def test_what_stands_between_projections_is_noticed(basis) -> None:
    clipped, normed = between(OlmoConfig(**SIZES, clip_qkv=0.05)), between(BitNetConfig(**SIZES))
    ids = torch.randint(3, 101, (1, 19))
    for model, sentence in (
        (clipped, "clips values to 0.05"),
        (normed, "has an operation before o_proj"),
    ):
        before = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(UnsupportedModelError, match=sentence):
            Fold(model, basis)
        assert folded_by(model) is None
        assert [p.data_ptr() for p in model.parameters()] == before
        logits(model, CompressedCache(model, basis), ids)  # works without folding


@dataclass(frozen=True)
class Late(Turned):
    """A basis without values in the first layer."""

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        whole = super().bind(layer, shape)
        return whole if layer else LayerBasis(key=whole.key)


@pytest.mark.parametrize("without_rotary", [False, True])
def test_layers_may_differ_in_what_they_have_a_basis_for(make, without_rotary: bool) -> None:
    model, ids = opt() if without_rotary else make(), torch.randint(3, 101, (2, 19))
    basis = Late("84", "43")
    want = logits(model, CompressedCache(model, basis), ids)
    with Fold(model, basis) as fold:
        assert "values" in fold.state.what
        found = logits(model, CompressedCache(model, basis), ids)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_a_basis_that_changed_since_is_refused(make, monkeypatch) -> None:
    model, basis = make(), Changing("8", "5")
    other = CompressedCache(model, basis)
    with Fold(model, basis):
        CompressedCache(model, basis)
        monkeypatch.setitem(basis.turn, "by", 7)
        with pytest.raises(ValueError, match="as it was before its file changed"):
            CompressedCache(model, basis)
    assert not other.runtime.bases.same_as(CompressedCache(model, basis).runtime.bases)


@dataclass(frozen=True)
class Changing(Turned):
    """A basis with equal parameters whose bound maps change."""

    turn: ClassVar[dict[str, int]] = {"by": 0}

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        return super().bind(layer + self.turn["by"], shape)


def test_a_folded_model_is_not_saved(make, tmp_path) -> None:
    model = make()
    sentence = r"v_proj holds a policy's basis.*restore the model"
    with Fold(model, RAGGED), pytest.raises(RuntimeError, match=sentence):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)


def test_a_model_that_was_converted_while_folded_is_whole_again(make) -> None:
    model, ids = make(), torch.randint(3, 101, (1, 9))
    want = model(ids).logits.double()
    fold = Fold(model, RAGGED)
    model.to(torch.float64)
    fold.restore()
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-5)


def test_cross_attention_is_left_alone() -> None:
    config = BartConfig(
        vocab_size=101,
        d_model=48,
        decoder_layers=3,
        encoder_layers=3,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        decoder_ffn_dim=64,
        is_decoder=True,
        is_encoder_decoder=False,
        max_position_embeddings=128,
    )
    model, ids = between(config), torch.randint(3, 101, (2, 19))
    old = [layer.encoder_attn.out_proj for layer in model.model.decoder.layers]
    want = logits(model, CompressedCache(model, RAGGED), ids)
    with Fold(model, RAGGED):
        assert [layer.encoder_attn.out_proj for layer in model.model.decoder.layers] == old
        found = logits(model, CompressedCache(model, RAGGED), ids)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
