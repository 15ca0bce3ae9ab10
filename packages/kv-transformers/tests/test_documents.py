"""A document is compressed once, saved, loaded and asked: exactly as with the first cache."""

import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

from alone import POLICIES, left, sharp_model
from kv_paging import PoolExhausted
from kv_policy import Budget, tensor_files
from kv_runtime.memory import PARTS
from kv_transformers import CompressedCache, document
from kv_transformers.cache_argument import passing
from kv_transformers.own_states import own_tensors
from latent_models import EXPERTS, SIZES, drawn
from small_sizes import windowed

MASK = left(31, 7, 19)
IDS = torch.randint(3, 101, MASK.shape, generator=torch.Generator().manual_seed(4)) * MASK
MORE = torch.randint(3, 101, (3, 5), generator=torch.Generator().manual_seed(6))
TURN = left(5, 2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("document") / "model"
    sharp_model().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def read(
    model: PreTrainedModel, cache: CompressedCache, ids: Tensor, mask: Tensor, start: int, end: int
) -> Tensor:
    """Run the model on some columns; return the logits."""
    place = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return model(
        ids[:, start:end],
        attention_mask=mask[:, :end].long(),
        position_ids=place[:, start:end],
        **passing(model, cache),
    ).logits


def compressed(model: PreTrainedModel, policy: str, **options: Any) -> CompressedCache:
    cache = CompressedCache(model, policy, page_tokens=4, backend="torch", **options)
    read(model, cache, IDS, MASK, 0, MASK.shape[1])
    return cache


def answers(
    model: PreTrainedModel, cache: CompressedCache, begin: Tensor = IDS, held: Tensor = MASK
) -> Tensor:
    """Return the logits of a turn of different lengths and of three tokens after it."""
    ids = torch.cat((begin, MORE * TURN, MORE[:, :3]), 1)
    mask = torch.cat((held, TURN, torch.ones(3, 3, dtype=torch.bool)), 1)
    first = MASK.shape[1]
    turn = read(model, cache, ids, mask, first, first + 5)
    steps = [read(model, cache, ids, mask, i, i + 1) for i in range(first + 5, first + 8)]
    return torch.cat((turn, *steps), 1)


@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_logits_after_loading_are_those_of_the_saved_cache(model, tmp_path, policy) -> None:
    cache, path = compressed(model, policy), tmp_path / "book.kv"
    cache.save(path, IDS)
    loaded = CompressedCache.load(model, path, page_tokens=4, backend="torch", ids=IDS)
    assert loaded.document is not None
    assert torch.equal(loaded.document.ids, IDS)
    assert torch.equal(answers(model, loaded), answers(model, cache))
    assert torch.equal(loaded.memory().tokens, cache.memory().tokens)


@pytest.mark.parametrize("policy", [p for p in POLICIES if not p.startswith("kv-compress")][1::3])
@torch.no_grad()
def test_a_file_is_loaded_with_another_page_size(model, tmp_path, policy) -> None:
    cache, path = compressed(model, policy), tmp_path / "book.kv"
    cache.save(path)
    loaded = CompressedCache.load(model, path, page_tokens=16, backend="torch")
    torch.testing.assert_close(answers(model, loaded), answers(model, cache), rtol=0, atol=1e-9)


@torch.no_grad()
def test_a_chat_goes_on_over_a_loaded_document(model, tmp_path) -> None:
    cache = CompressedCache(model, "h2o:budget=12+k8v4:window=4")
    ids = IDS[:1]
    model(ids, **passing(model, cache))
    cache.save(tmp_path / "book.kv", ids)
    loaded = CompressedCache.load(model, tmp_path / "book.kv")
    for turn in (MORE[:1], MORE[1:2]):
        ids = torch.cat((ids, turn), 1)
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | options
        want = model.generate(**given, **passing(model, cache))
        assert torch.equal(model.generate(**given, **passing(model, loaded)), want)
        ids = want


@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_repeated_sequences_hold_pages_once_and_answer_as_copies_do(model, policy) -> None:
    """Questions of different lengths, then tokens; copies are made when pages are written to."""
    joint, apart = compressed(model, policy), compressed(model, policy)
    one = joint.memory()
    grows = joint.runtime._keeper.grows
    apart.runtime._keeper.grows = False  # so that every sequence gets copies
    source = torch.tensor([0, 0, 2])
    for cache in (joint, apart):
        cache.batch_select_indices(source)
    held = joint.memory()
    if grows and one.pages_used:
        assert held.pages_used < apart.memory().pages_used
    assert held.total_bytes == sum(getattr(held, part) for part in PARTS)
    given = IDS[source], MASK[source]
    assert torch.equal(answers(model, joint, *given), answers(model, apart, *given))
    assert torch.equal(joint.memory().tokens, apart.memory().tokens)
    joint.runtime.batch.tiers.check()


@torch.no_grad()
def test_one_document_answers_questions_of_different_lengths_at_once(model, tmp_path) -> None:
    ids = IDS[:1]
    cache = CompressedCache(model, "snapkv:budget=12,window=4+k8v4")
    model(ids, **passing(model, cache))
    cache.save(tmp_path / "book.kv", ids)
    many = CompressedCache.load(model, tmp_path / "book.kv")
    many.batch_repeat_interleave(3)
    whole = torch.cat((ids.expand(3, -1), MORE * TURN), 1)
    mask = torch.cat((torch.ones_like(ids).expand(3, -1), TURN), 1).bool()
    got = read(model, many, whole, mask, ids.shape[1], whole.shape[1])
    for row in range(3):
        one = CompressedCache.load(model, tmp_path / "book.kv")
        fresh = MORE[row : row + 1, TURN[row]]
        want = model(fresh, **passing(model, one)).logits
        torch.testing.assert_close(got[row : row + 1, TURN[row]], want, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_budgets_of_sequences_are_in_the_file(model, tmp_path) -> None:
    own = [Budget(6), Budget(50, "percent"), None]
    cache = compressed(model, "snapkv:budget=10,window=4", budgets=own)
    cache.save(tmp_path / "book.kv")
    loaded = CompressedCache.load(model, tmp_path / "book.kv", page_tokens=4, backend="torch")
    assert torch.equal(answers(model, loaded), answers(model, cache))


@torch.no_grad()
def test_latents_are_saved_as_other_tokens(tmp_path) -> None:
    drawn(DeepseekV3Config(**SIZES | EXPERTS)).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    cache = compressed(model, "snapkv:budget=12,window=4+k8v8:window=3")
    cache.save(tmp_path / "book.kv")
    loaded = CompressedCache.load(model, tmp_path / "book.kv", page_tokens=4, backend="torch")
    assert torch.equal(answers(model, loaded), answers(model, cache))


@torch.no_grad()
def test_a_window_that_is_damaged_is_refused(tmp_path) -> None:
    drawn(windowed()).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    cache, path = CompressedCache(model, "raw"), tmp_path / "book.kv"
    model(IDS[:1], **passing(model, cache))
    own = own_tensors([*cache.own_layers])
    assert {name: tuple(x.shape) for name, x in own.items()} == {
        "own.0.key": (1, 2, 7, 16),
        "own.0.value": (1, 2, 7, 16),
    }
    state = cache.runtime.state()
    for wrong, said in (
        ({}, "own.0 lacks keys or values of its window"),
        ({"own.0.key": own["own.0.key"]}, "own.0 lacks keys or values of its window"),
        ({**own, "own.0.key": own["own.0.key"][:, :, :3]}, "should have keys and values of 7"),
        ({**own, "own.1.key": own["own.0.key"].clone()}, "is of no layer that this model has"),
        ({**own, "own.0.conv.0": own["own.0.key"].clone()}, "which this model does not keep"),
        ({**own, "own.0.key": own["own.0.key"].int()}, "should be floats of 1 sequences"),
        ({**own, "own.x": own["own.0.key"].clone()}, "is of no layer that this model has"),
    ):
        document.save(path, model, state, None, wrong, private=False, chat=None)
        with pytest.raises(ValueError, match=f"is damaged: .*{said}"):
            CompressedCache.load(model, path)


def test_what_is_not_saved_of_transformers_is_refused() -> None:
    class Indexer:
        keys = None

        def __init__(self) -> None:
            self.indexed = torch.ones(1, 4, 8)

    recording = DynamicSlidingWindowLayer(sliding_window=8)
    recording.activate_past_recording()
    recording.update(torch.ones(1, 2, 9, 4), torch.ones(1, 2, 9, 4))
    for layer in (Indexer(), recording):
        with pytest.raises(ValueError, match=rf"{type(layer).__name__}\) that is not saved"):
            own_tensors([layer])


@torch.no_grad()
def test_a_file_is_hardly_larger_than_the_bytes_held(model, tmp_path) -> None:
    ids = torch.randint(3, 101, (1, 4096), generator=torch.Generator().manual_seed(1))
    cache = CompressedCache(model, "k8v4")
    model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(4096)[None])
    for i in range(0, 4096, 512):
        model(ids[:, i : i + 512], **passing(model, cache))
    cache.save(tmp_path / "book.kv", ids, private=True)
    report = cache.memory()
    size = (tmp_path / "book.kv").stat().st_size
    tokens = report.vector_bytes + ids.numel()  # the columns, a byte each
    assert report.vector_bytes < size <= 1.01 * tokens + 4096


@pytest.fixture(scope="module")
def book(model: PreTrainedModel, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.kv"
    with torch.no_grad():
        compressed(model, "snapkv:budget=10,window=4+k8v4:window=3").save(path, IDS)
    return path


def test_a_file_of_another_model_is_refused(make, book, tmp_path, model) -> None:
    with pytest.raises(ValueError, match="this one was not loaded from a folder"):
        CompressedCache.load(make(), book)
    make().save_pretrained(tmp_path / "other")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"compressed with the model model \(\w{16}\), but this"):
        CompressedCache.load(other, book)
    again = AutoModelForCausalLM.from_pretrained(model.config.name_or_path, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"of another model.*float64.*float32"):
        CompressedCache.load(again, book)
    nowhere = make()
    cache = CompressedCache(nowhere, "raw")
    with torch.no_grad():
        nowhere(IDS[:1], **passing(nowhere, cache))
    with pytest.raises(ValueError, match="its model was not loaded from a folder"):
        cache.save(tmp_path / "book.kv")


def test_another_policy_is_refused_and_the_same_is_not(model, book) -> None:
    with pytest.raises(ValueError, match="but k8v4 was given; omit the policy"):
        CompressedCache.load(model, book, policy="k8v4")
    CompressedCache.load(model, book, policy="snapkv:window=4,budget=10+k8v4:window=3")


def test_ids_that_do_not_match_are_refused(model, book, tmp_path) -> None:
    wrong = IDS.clone()
    wrong[2, -3] += 1
    with pytest.raises(ValueError, match="sequence 2 differs at token 28"):
        CompressedCache.load(model, book, ids=wrong)
    with pytest.raises(ValueError, match="3 sequences of 31 tokens, but ids of shape"):
        CompressedCache.load(model, book, ids=IDS[:, 1:])
    CompressedCache.load(model, book, ids=torch.cat((IDS, MORE), 1))
    with torch.no_grad():
        cache = compressed(model, "k8v4")
    with pytest.raises(ValueError, match="cache holds 3 sequences of 31 columns"):
        cache.save(tmp_path / "book.kv", IDS[:, 1:])
    cache.save(tmp_path / "book.kv")
    with pytest.raises(ValueError, match="saved without ids"):
        CompressedCache.load(model, tmp_path / "book.kv", ids=IDS)


def test_private_ids_are_in_the_file_as_a_hash_alone(model, tmp_path) -> None:
    with torch.no_grad():
        cache = compressed(model, "k8v4")
    path = tmp_path / "book.kv"
    with pytest.raises(ValueError, match="pass ids"):
        cache.save(path, private=True)
    cache.save(path, IDS, private=True)
    with safe_open(path, framework="pt") as file:
        assert "ids" not in file.keys()  # noqa: SIM118 (no mapping)
    padded = IDS.masked_fill(~MASK, 99)
    loaded = CompressedCache.load(model, path, ids=padded)
    assert loaded.document.ids is None
    with pytest.raises(ValueError, match="whose hash differs"):
        CompressedCache.load(model, path, ids=IDS + 1)


def test_a_loaded_document_is_forgotten_when_the_cache_is_reset(model, book) -> None:
    cache = CompressedCache.load(model, book)
    cache.reset()
    assert cache.document is None
    assert not cache.columns


def test_a_fixed_pool_that_is_too_small_is_exhausted(model, book) -> None:
    with pytest.raises(PoolExhausted):
        CompressedCache.load(model, book, pages=3)


def test_no_file_and_other_files_are_refused(model, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not exist.*`kv-serve compress MODEL"):
        CompressedCache.load(model, tmp_path / "book.kv")
    tensor_files.write(tmp_path / "a.kv", "kv-svd statistics 1", "{}", {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="has no 'kv-transformers document 1', but 'kv-svd"):
        CompressedCache.load(model, tmp_path / "a.kv")
    tensor_files.write(tmp_path / "b.kv", "kv-transformers document 2", "{}", {})
    with pytest.raises(ValueError, match=r"version 2 of the format.*read versions up to 1"):
        CompressedCache.load(model, tmp_path / "b.kv")
    with pytest.raises(ValueError, match="is a directory"):
        CompressedCache.load(model, tmp_path)


def test_an_interrupted_write_leaves_the_former_file(model, book, tmp_path, monkeypatch) -> None:
    path = tmp_path / "book.kv"
    path.write_bytes(book.read_bytes())
    cache = CompressedCache.load(model, path)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["book.kv"]
    assert path.read_bytes() == book.read_bytes()


@given(place=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255), cut=st.booleans())
@settings(max_examples=15)
def test_a_flipped_byte_or_a_cut_is_always_noticed(model, book, place, bits, cut) -> None:
    data = bytearray(book.read_bytes())
    at = int(place * len(data))
    if cut:
        data = data[:at]
    else:
        data[at] ^= bits
    path = book.with_name("flipped.kv")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged|has no|newer"):
        CompressedCache.load(model, path)


def resealed(book: Path, name: str, change: Any, *, fact: bool = False) -> Path:
    """Write a file again with another tensor or fact, and the checksums of that."""
    facts, tensors = tensor_files.read_advised(book, document.FORMAT, document._ADVICE)
    tensors = {key: x.clone() for key, x in tensors.items()}
    known = msgspec.json.decode(facts)
    kept = known["cache"] if fact else tensors
    kept[name] = change(kept[name])
    path = book.with_name("resealed.kv")
    tensor_files.write(path, document.FORMAT, msgspec.json.encode(known).decode(), tensors)
    return path


@given(data=st.data())
@settings(max_examples=12)
def test_a_forged_file_is_refused_or_harmless(model, book, data) -> None:
    _, tensors = tensor_files.read_advised(book, document.FORMAT, document._ADVICE)
    name = data.draw(st.sampled_from(sorted(tensors)))
    number = data.draw(st.sampled_from([-(2**31), -1, 0, 1, 17, 2**20, 2**31 - 1]))
    place = data.draw(st.integers(0, max(0, tensors[name].numel() - 1)))

    def change(x: Tensor) -> Tensor:
        raw = x.contiguous().view(-1).view(torch.uint8)
        width = x.element_size()
        some = struct.pack("<q", number)[:width]
        start = place * width
        raw[start : start + width] = torch.tensor(list(some), dtype=torch.uint8)
        return x

    path = resealed(book, name, change)
    try:
        cache = CompressedCache.load(model, path, page_tokens=4, backend="torch")
    except ValueError:
        return
    with torch.no_grad():
        answers(model, cache)
    cache.runtime.batch.pool.check(cache.runtime.batch.pages())
    assert cache.memory().total_bytes < 20 * path.stat().st_size


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequences", 10**9),
        ("columns", 10**15),
        ("sizes", [2, 2, 8, 2**40]),
        ("dtype", "float8"),
        ("policy", "snapkv:budget=10,window=4+k8v4:window=900000000"),
        ("policy", "no-such-policy"),
        ("policy", "a" * 100000),
        ("turns", None),
        ("budgets", ["x", "y", "z"]),
        ("basis", "0" * 64),
        ("folded", ["keys"]),
    ],
)
def test_forged_facts_are_refused_before_memory_is_taken(model, book, name, value) -> None:
    path = resealed(book, name, lambda _: value, fact=True)
    with pytest.raises(ValueError, match=str(path)):
        CompressedCache.load(model, path)


@pytest.mark.gpu
@torch.no_grad()
def test_a_file_of_a_cpu_is_loaded_on_a_gpu(model, folder, book) -> None:
    on_gpu = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).cuda().eval()
    cache = CompressedCache.load(on_gpu, book, backend="torch")
    state = cache.runtime.state()
    _, tensors = tensor_files.read_advised(book, document.FORMAT, document._ADVICE)
    assert all(torch.equal(state.tensors[name], x) for name, x in tensors.items() if name != "ids")
