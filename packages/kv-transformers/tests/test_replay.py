"""KVzip in transformers: the second reading of prompts, its scores, and what it refuses."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alone import Reader, left, right, sharp_model, steps
from kv_policy import parse
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from letters import Letters

ROOM = 512  # a budget that evicts nothing
CHUNK = 16


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return sharp_model()


def made(model: PreTrainedModel, text: str, **options: object) -> CompressedCache:
    options = {"tokenizer": Letters(), "page_tokens": 4, "backend": "torch"} | options
    return CompressedCache(model, text, **options)


def stored(cache: CompressedCache, sequences: int = 1) -> tuple[Tensor, Tensor]:
    """Return positions and scores of the single tier, by layer, sequence and head, ascending."""
    (store,) = cache.runtime.batch.stores
    read = store.read(store.table_rows())
    position = read.position.masked_fill(~read.held, 9999)
    order = position.argsort(-1)
    lead = cache.runtime.shape.layers, sequences, cache.runtime.shape.kv_heads
    return tuple(x.gather(-1, order).unflatten(0, lead) for x in (position, read.score))


def texts(prompt: list[int], chunk: int = CHUNK) -> list[tuple[int, list[int]]]:
    """Return the start of each chunk and what is read for it, from the paper's description."""
    encode = partial(Letters().encode, add_special_tokens=False)
    found = []
    for start in range(0, len(prompt), chunk):
        said = encode("\n\nRepeat the previous context exactly.")
        if start:
            words = "\n\nRepeat the part of the previous context exactly, starting with "
            said = encode(words) + prompt[start - 8 : start]
        found.append((start, said + prompt[start : start + chunk]))
    return found


@torch.no_grad()
def oracle(model: PreTrainedModel, ids: Tensor, before: int = 0, chunk: int = CHUNK) -> Tensor:
    """Score the tokens from `before` on from whole attention matrices; [layer, head, token]."""
    model.set_attn_implementation("eager")
    heads = model.config.num_key_value_heads
    length = ids.shape[1]
    scores = torch.zeros(model.config.num_hidden_layers, heads, length - before)
    scores = scores.double()
    for start, text in texts(ids[0, before:].tolist(), chunk):
        again = torch.cat([ids, torch.tensor([text])], 1)
        matrices = model(again, output_attentions=True).attentions
        for layer, matrix in enumerate(matrices):
            rows = matrix[0, :, length:].unflatten(0, (heads, -1))
            at = slice(before + start, min(before + start + chunk, length))
            here, own = rows[..., at], rows[..., length:]
            share = here / (here.sum(-1, keepdim=True) + own.sum(-1, keepdim=True))
            scores[layer, :, at.start - before : at.stop - before] = share.amax((1, 2))
    model.set_attn_implementation("sdpa")
    return scores


@pytest.mark.parametrize("chunk", [8, CHUNK, 64])
@torch.no_grad()
def test_scores_are_those_of_whole_attention_matrices(model, chunk) -> None:
    ids = torch.randint(3, 101, (1, 45), generator=torch.Generator().manual_seed(2))
    cache = made(model, f"kvzip:budget={ROOM},chunk={chunk}")
    logits = model(ids, **passing(model, cache)).logits
    torch.testing.assert_close(logits, model(ids).logits)  # the replay changes no output
    position, score = stored(cache)
    assert torch.equal(position[..., :45], torch.arange(45).expand(2, 1, 2, 45))
    want = oracle(model, ids, chunk=chunk)
    torch.testing.assert_close(score[:, 0, :, :45].double(), want, rtol=1e-5, atol=1e-7)
    assert want.std() > 0.05  # not all alike


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_models_and_dtypes(make, name, dtype) -> None:
    model, ids = make(name, dtype), torch.randint(3, 101, (1, 40))
    cache = made(model, "kvzip:budget=16", backend="auto")
    model(ids, **passing(model, cache))
    assert int(cache.memory().tokens.sum()) == 16 * 6


@torch.no_grad()
def test_the_lowest_scores_of_all_heads_and_layers_are_evicted_and_their_memory_freed(
    model,
) -> None:
    ids = torch.randint(3, 101, (1, 120), generator=torch.Generator().manual_seed(3))
    score = oracle(model, ids)
    score[..., :4] = score[..., -8:] = torch.inf
    whole, cache = made(model, f"kvzip:budget={ROOM}"), made(model, "kvzip:keep=25%,chunk=16")
    for each in (whole, cache):
        model(ids, **passing(model, each))
    tokens = cache.memory().tokens
    assert int(tokens.sum()) == 30 * 4
    assert len(tokens.unique()) > 1  # heads share one budget
    assert cache.memory().total_bytes < 0.35 * whole.memory().total_bytes
    position, _ = stored(cache)
    worst_kept, best_evicted = [], []
    for layer in range(2):
        for head in range(2):
            held = [p for p in position[layer, 0, head].tolist() if p < 9999]
            mine = score[layer, head]
            gone = torch.ones(120, dtype=torch.bool)
            gone[held] = False
            assert mine[held].min() >= mine[gone].max()
            worst_kept.append(mine[held].sort().values[3])  # prices are of pages of four
            best_evicted.append(mine[gone].max())
    assert min(worst_kept) >= max(best_evicted)


@torch.no_grad()
def test_even_layers_keep_the_same(model) -> None:
    cache = made(model, "kvzip:budget=32,layers=even,pool=3")
    model(torch.randint(3, 101, (1, 90)), **passing(model, cache))
    assert cache.memory().tokens.sum((1, 2)).tolist() == [64, 64]


@torch.no_grad()
def test_a_later_turn_is_read_again_on_its_own(model) -> None:
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 101, (1, 70), generator=draw)
    cache = made(model, f"kvzip:budget={ROOM},chunk=16")
    for part in ids.split([30, 1, 1, 38], 1):  # a prompt, two generated tokens, a turn
        model(part, **passing(model, cache))
    _, score = stored(cache)
    score = score[:, 0, :, :70].double()
    want = torch.cat([oracle(model, ids[:, :30]), torch.ones(2, 2, 2), oracle(model, ids, 32)], -1)
    torch.testing.assert_close(score, want, rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_a_later_turn_attends_to_what_is_stored(model) -> None:
    # A quantized and compressed history, a raw window, and a turn of several chunks.
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 101, (1, 150), generator=draw)
    cache = made(model, "kvzip:budget=40,chunk=16+k8v4:window=6")
    for part in ids.split([90, 1, 59], 1):
        model(part, **passing(model, cache))
    assert int(cache.memory().tokens.sum()) <= 46 * 4
    assert cache.memory().tokens.sum() >= 40 * 4


@torch.no_grad()
def test_generated_tokens_grow_the_cache_and_outlive_the_prompt(model) -> None:
    ids = torch.randint(3, 101, (1, 60), generator=torch.Generator().manual_seed(6))
    cache = made(model, "kvzip:budget=24,sinks=0,recent=0")
    said = model.generate(ids, max_new_tokens=9, do_sample=False, **passing(model, cache))
    assert cache.memory().tokens.sum() == 24 * 4 + 8 * 4
    turn = torch.cat([said, torch.randint(3, 101, (1, 12))], 1)
    model.generate(turn, max_new_tokens=1, do_sample=False, **passing(model, cache))
    assert cache.memory().tokens.sum() == 24 * 4
    position, _ = stored(cache)
    for held in position.flatten(0, 2).tolist():
        assert set(range(60, 68)) <= set(held)


POLICY = "kvzip:budget=14,chunk=8"


class ReplayReader(Reader):
    def cache(self) -> CompressedCache:
        return made(self.model, self.policy)


@pytest.mark.parametrize("policy", [POLICY, f"{POLICY},layers=even+k8v4:window=3"])
@torch.no_grad()
def test_padded_batches_are_as_their_rows_alone(model, policy) -> None:
    finished = torch.tensor([[True], [False], [True]])
    reader = ReplayReader(model, policy)
    reader.expect_alone([left(33, 1, 20), *steps(2, 3)])
    reader.expect_alone([left(9, 5, 30), finished, right(24, 1, 17), finished, *steps(2, 3)])
    prompts = left(40, 1, 22).split([1, 20, 19], 1)
    reader.expect_alone([*prompts, *steps(2, 3)])


def test_beams_and_several_answers_go_on_from_one_prompt(model) -> None:
    ids, options = torch.randint(3, 101, (2, 30)), {"max_new_tokens": 6, "do_sample": False}
    for how in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        full = model.generate(ids, **options, **how)
        ours = passing(model, made(model, f"kvzip:budget={ROOM}"))
        assert torch.equal(model.generate(ids, **options, **how, **ours), full)


@torch.inference_mode()
def test_the_bare_decoder_and_inference_mode(model) -> None:
    ids = torch.randint(3, 101, (1, 50))
    caches = [made(model, POLICY) for _ in range(2)]
    model(ids, **passing(model, caches[0]))
    model.model(input_ids=ids, **passing(model.model, caches[1]))
    one, other = (stored(cache)[0] for cache in caches)
    assert torch.equal(one, other)


@torch.no_grad()
def test_caches_that_share_a_prefill_share_its_replay(model) -> None:
    ids = torch.randint(3, 101, (1, 60))
    texts = ("kvzip:budget=16", "kvzip:budget=32,pool=3+k8v4")
    leader, follower = (made(model, text) for text in texts)
    leader.runtime.share_prefill([follower.runtime])
    model(ids, **passing(model, leader))
    for cache, text in zip((leader, follower), texts, strict=True):
        alone = made(model, text)
        model(ids, **passing(model, alone))
        assert torch.equal(stored(cache)[0], stored(alone)[0])
        model(torch.tensor([[5]]), **passing(model, cache))
    for other in ("snapkv:budget=40", "kvzip:budget=32,chunk=16"):
        with pytest.raises(ValueError, match="do not read a prompt again in the same way"):
            made(model, "kvzip:budget=32").runtime.share_prefill([made(model, other).runtime])


@torch.no_grad()
def test_a_copy_goes_on_by_itself(model) -> None:
    from copy import deepcopy

    ids = torch.randint(3, 101, (1, 60))
    cache = made(model, POLICY)
    model(ids[:, :40], **passing(model, cache))
    copy = deepcopy(cache)
    for each in (cache, copy):
        model(ids[:, 40:], **passing(model, each))
    assert torch.equal(stored(cache)[0], stored(copy)[0])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@torch.no_grad()
def test_an_error_in_the_replay_leaves_an_unfinished_pass(model, error) -> None:
    ids = torch.randint(3, 101, (1, 40))
    cache = made(model, POLICY)

    def fail(*given: object) -> None:
        raise error("stop")

    calls = []

    def second(module: object, args: object) -> None:
        calls.append(module)
        if len(calls) == 2:
            fail()

    hook = model.model.layers[1].mlp.register_forward_pre_hook(second)
    with pytest.raises(error, match="stop"):
        model(ids, **passing(model, cache))
    hook.remove()
    with pytest.raises(RuntimeError, match="stopped in the replay of its prompt"):
        model(ids[:, :1], **passing(model, cache))
    assert not model.config._attn_implementation.startswith("kv_transformers")
    cache.reset()
    model(ids, **passing(model, cache))
    alone = made(model, POLICY)
    model(ids, **passing(model, alone))
    assert torch.equal(stored(cache)[0], stored(alone)[0])


def test_a_missing_tokenizer_is_refused(model) -> None:
    with pytest.raises(ValueError, match=r"tokenizer is needed; pass CompressedCache\(model, p"):
        CompressedCache(model, "kvzip:budget=64")
    CompressedCache(model, "snapkv:budget=64")


@torch.no_grad()
def test_embeddings_are_refused_before_anything_is_stored(model) -> None:
    cache = made(model, POLICY)
    embeddings = model.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
    with pytest.raises(ValueError, match=r"called with embeddings \(inputs_embeds"):
        model(inputs_embeds=embeddings, **passing(model, cache))
    assert cache.memory().tokens.numel() == 0
    model(torch.tensor([[5, 6, 7]]), **passing(model, cache))


def test_a_policy_says_what_it_reads_again(model) -> None:
    selector = parse("kvzip:budget=64,chunk=99").selector
    assert selector.replay.tokens == 99
    ours: Callable[..., object] = made(model, "kvzip:budget=64")
    assert ours.runtime.replay.tokens == 2048
