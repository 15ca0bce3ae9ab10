"""Masks that a compressed cache does not support raise before anything is stored."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
)
from transformers import masking_utils as masking

from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.masks import MaskCheck
from kv_transformers.support import UnsupportedModelError
from own_llama import IDS, SIZES, llama

ROW = IDS[:1]


def mask(columns: int, *hidden: int) -> torch.Tensor:
    made = torch.ones(1, columns, dtype=torch.long)
    made[:, list(hidden)] = 0
    return made


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


LATER = {
    "hides a stored column": (mask(14, 0, 1, 5), "hides columns whose tokens"),
    "shows padding": (mask(14, 0), "shows columns that were padding"),
    "is missing": (None, "absence of an attention_mask"),
    "is of this pass alone": (mask(2), "has 2 columns instead of 14: 12 that"),
    "is longer": (mask(20, 0, 1), "has 20 columns instead of 14"),
}


@pytest.mark.parametrize("policy", ["raw", "streaming:budget=8"])
@pytest.mark.parametrize("kind", LATER)
@torch.no_grad()
def test_a_later_mask_has_to_be_that_of_the_cache(model, policy, kind) -> None:
    cache = CompressedCache(model, policy)
    model(ROW, attention_mask=mask(12, 0, 1), **passing(model, cache))
    wrong, message = LATER[kind]
    with pytest.raises(ValueError, match=message):
        model(ROW[:, :2], attention_mask=wrong, **passing(model, cache))
    assert cache.get_seq_length() == 12
    model(ROW[:, :2], attention_mask=mask(14, 0, 1), **passing(model, cache))  # nothing was lost


@torch.no_grad()
def test_a_column_hidden_in_a_decode_step_or_in_the_users_own_tensor(model) -> None:
    for given in (mask(12).bool(), mask(12)):
        cache = CompressedCache(model, "raw")
        model(ROW, attention_mask=given, **passing(model, cache))
        given[0, 3] = 0  # the cache keeps a copy
        more = torch.cat([given, given[:, -1:]], 1)
        with pytest.raises(ValueError, match="hides columns whose tokens"):
            model(ROW[:, :1], attention_mask=more, **passing(model, cache))


@torch.no_grad()
def test_rows_that_were_reordered_are_compared_with_their_own_masks(model) -> None:
    cache = CompressedCache(model, "raw")
    given = torch.cat([mask(12), mask(12, 0, 1)])
    model(IDS, attention_mask=given, **passing(model, cache))
    cache.reorder_cache(torch.tensor([1, 0]))
    more = torch.ones(2, 1, dtype=torch.long)
    step = torch.cat([given, more], 1)
    with pytest.raises(ValueError, match="hides columns whose tokens"):
        model(IDS[:, :1], attention_mask=step, **passing(model, cache))
    step = torch.cat([given.flip(0), more], 1)
    model(IDS[:, :1], attention_mask=step, **passing(model, cache))


@torch.no_grad()
def test_columns_taken_back_may_come_again_as_padding(model) -> None:
    cache = CompressedCache(model, "raw")
    model(ROW, attention_mask=mask(12), **passing(model, cache))
    cache.crop(-4)
    step = model(ROW[:, :4], attention_mask=mask(12, 8), **passing(model, cache)).logits
    ids = torch.cat([ROW[:, :8], ROW[:, :4]], 1)
    whole = model(ids, attention_mask=mask(12, 8)).logits
    torch.testing.assert_close(step[:, 1:], whole[:, 9:], rtol=1e-4, atol=1e-5)


def test_a_decode_step_that_does_not_wait_is_refused_by_the_next() -> None:
    """Simulate a GPU, where the comparison is read one pass later."""
    check = MaskCheck(waits=False).after(mask(12).bool(), None, 12)
    check = check.after(mask(13).bool(), mask(12).bool(), 1)
    with pytest.raises(ValueError, match="attention_mask hides"):
        check.after(
            mask(15, 4).bool(), mask(13).bool(), 2
        )  # passes of several columns wait for the comparison
    wrong = check.after(mask(14, 4).bool(), mask(13).bool(), 1)
    with pytest.raises(ValueError, match="of an earlier step hides"):
        wrong.after(mask(15, 4).bool(), mask(14).bool(), 1)
    again = wrong.after(
        mask(5).bool(), None, 5
    )  # after reset() there are no stored columns to compare
    again.after(mask(6).bool(), mask(5).bool(), 1)


PLAIN = masking.create_causal_mask


def with_mask_function(**more: object) -> object:
    """Create the mask of a model that adds its own function to the causal one."""

    def made(*args: object, **kwargs: object) -> object:
        return PLAIN(*args, **(kwargs | more))

    return made


FUNCTIONS = {
    "a prefix": {"or_mask_function": lambda b, h, q, k: k < 4},
    "a window": {"and_mask_function": lambda b, h, q, k: k > q - 4},
    "a block": {"block_sequence_ids": torch.tensor([[-1, -1, 0, 0, 0, -1, -1, -1, 1, 1, -1, -1]])},
}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_tokens_that_see_later_ones_are_served_and_windows_refused(
    model, kind, padded, monkeypatch
) -> None:
    from transformers.models.llama import modeling_llama

    given = mask(12, 0) if padded else None
    causal = model(ROW, attention_mask=given).logits
    monkeypatch.setattr(modeling_llama, "create_causal_mask", with_mask_function(**FUNCTIONS[kind]))
    want = model(ROW, attention_mask=given).logits
    assert not torch.allclose(want, causal, atol=1e-3)
    for backend in ("torch", "cpu"):
        cache = CompressedCache(model, "raw", backend=backend)
        if kind == "a window":
            with pytest.raises(ValueError, match="does not see every token before it"):
                model(ROW, attention_mask=given, **passing(model, cache))
            assert not cache.is_initialized
            continue
        got = model(ROW, attention_mask=given, **passing(model, cache)).logits
        torch.testing.assert_close(got[:, 1:], want[:, 1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_prompt_whose_tokens_all_see_each_other(padded) -> None:
    model = llama()
    cache = CompressedCache(model, "raw")
    model.config.is_causal = False
    with pytest.raises(UnsupportedModelError, match="in both directions"):
        CompressedCache(model, "raw")
    given = mask(12, 0) if padded else None
    want = model(ROW, attention_mask=given, **passing(model, DynamicCache())).logits
    got = model(ROW, attention_mask=given, **passing(model, cache)).logits
    torch.testing.assert_close(got[:, 1:], want[:, 1:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_module_that_is_told_so_by_keyword_is_refused(model, monkeypatch) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda *_, **__: None)
    cache = CompressedCache(model, "raw")
    with pytest.raises(ValueError, match="attends in both directions"):
        model(ROW, is_causal=False, **passing(model, cache))
    whole = model(ROW, **passing(model, DynamicCache())).logits  # None is causal by itself
    got = model(ROW, **passing(model, CompressedCache(model, "raw"))).logits
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", ["position_bias", "sinks", "cu_seq_lens_q"])
@torch.no_grad()
def test_what_a_model_asks_of_attention_beside_is_refused(model, option) -> None:
    cache = CompressedCache(model, "raw")
    with pytest.raises(
        ValueError, match=rf"\({option}\), which a compressed cache does not support"
    ):
        model(ROW, **{option: torch.zeros(1, 4, 12, 12)}, **passing(model, cache))


@torch.no_grad()
def test_several_sequences_in_a_row_are_refused(model) -> None:
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    cache = CompressedCache(model, "raw")
    with pytest.raises(ValueError, match="position_ids decrease within a row"):
        model(ROW, position_ids=packed, **passing(model, cache))
    behind = torch.tensor([[1, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])  # as generate counts padding
    model(ROW, attention_mask=mask(12, 0, 1), position_ids=behind, **passing(model, cache))


def pictured(cls: type[PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(2)
    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    if cls is PaliGemmaForConditionalGeneration:
        text = GemmaConfig(**SIZES)
        config = PaliGemmaConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=100,
            projection_dim=32,
            hidden_size=32,
        )
    else:
        text = Gemma3TextConfig(**SIZES, layer_types=["full_attention"] * 2)
        config = Gemma3Config(
            vision_config=vision,
            text_config=text,
            image_token_index=100,
            boi_token_index=98,
            eoi_token_index=99,
            mm_tokens_per_image=4,
        )
    return cls(config).eval()


@pytest.mark.parametrize("cls", [PaliGemmaForConditionalGeneration, Gemma3ForConditionalGeneration])
@torch.no_grad()
def test_prefixes_and_pictures_whose_tokens_see_each_other(cls) -> None:
    model = pictured(cls)
    options = {"max_new_tokens": 4, "do_sample": False}
    text = ROW.clamp(max=97)
    ids = torch.cat((text, text.flip(1)))
    ids[0, 2:6] = ids[1, 3:7] = 100
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    kinds = (ids == 100).long()
    if cls is PaliGemmaForConditionalGeneration:
        kinds = (torch.arange(12) >= 9).long().expand(2, -1)  # the prefix has type 0
    given = {"pixel_values": pixels, "token_type_ids": kinds}
    for padding in (None, torch.cat((mask(12), mask(12, 0, 1)))):
        row = text if padding is None else text.expand(2, -1)
        seen = {"attention_mask": padding}
        for more, asked in (({}, row), (given, ids)):
            caches = DynamicCache(config=model.config), CompressedCache(model, "raw")
            want, got = (
                model.generate(asked, **seen, **more, **options, **passing(model, cache))
                for cache in caches
            )
            assert torch.equal(got, want)
    cache = CompressedCache(model, "snapkv:budget=6,window=2+k8v4")
    model.generate(ids, **given, **options, **passing(model, cache))
    assert cache.memory().tokens.unique().tolist() == [9]


def test_a_prefix_of_embeddings_counts_as_columns(model) -> None:
    """Embeddings instead of ids, like prompts of adapters: the mask covers them too."""
    model = AutoModelForCausalLM.from_config(model.config).eval()
    with torch.no_grad():
        embedded = model.get_input_embeddings()(ROW)
        whole = model(inputs_embeds=embedded).logits
        cache = CompressedCache(model, "raw")
        model(inputs_embeds=embedded[:, :5], attention_mask=mask(5), **passing(model, cache))
        rest = model(ROW[:, 5:], attention_mask=mask(12), **passing(model, cache)).logits
    torch.testing.assert_close(rest, whole[:, 5:], rtol=1e-4, atol=1e-5)
