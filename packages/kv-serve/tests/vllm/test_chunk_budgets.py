"""A budget that is planned after each chunk: prompts longer than all of the memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest
import torch

from live_engine import ends
from vllm_models import NEEDS_TOKENIZER

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
BUDGET, CHUNK, BLOCK = 48, 64, 16
POLICY = f"gate:file=smollm2-135m,budget={BUDGET},recent=16,chunks=true"
STREAMING = f"streaming:budget={BUDGET},chunks=true"
# Blocks for the budget, for an uneven share of it in each head, and for the first tokens generated.
MOST = BUDGET // BLOCK + 2
HELD = 2 * MOST - 1  # so that a second request fits only while the first one reads
OPTIONS = {
    "max_model_len": 512,
    "max_num_batched_tokens": CHUNK,
    "block_size": BLOCK,
    "dtype": "float32",
    "poison": True,
}


def memory(blocks: int, *sizes: int) -> int:
    """Return the bytes of blocks and of vLLM's own one, for layers, heads and dimensions."""
    from kv_policy import CacheShape, parse
    from kv_runtime import Account, Layout

    layers, heads, dim = sizes
    shape = CacheShape(layers, heads, 1, dim, dim, torch.float32)
    layout = Layout.of(parse("streaming"), shape, None, BLOCK)
    return (blocks + 1) * Account.of(layout, BLOCK).block_bytes


@pytest.fixture(scope="module")
def document() -> list[int]:
    """Return six chunks of random tokens."""
    draw = torch.Generator().manual_seed(5)
    found: list[int] = torch.randint(3, 256, (6 * CHUNK,), generator=draw).tolist()
    return found


@pytest.fixture(scope="module")
def small(start: Start, weights: str) -> Iterator["LLM"]:
    """Start an engine of a tiny model with memory for little more than one request."""
    options = OPTIONS | {"skip_tokenizer_init": True}
    size = memory(HELD, 2, 2, 32)
    with start(weights, STREAMING, kv_cache_memory_bytes=size, **options) as running:
        assert ends(running)[0].manager.block_pool.num_gpu_blocks - 1 == HELD
        yield running


def run(
    engine: "LLM", prompts: dict[str, Sequence[int]], count: int, **extra: object
) -> tuple[dict[str, list[int]], int]:
    """Generate greedily; return the new tokens, and the most blocks that were ever owned."""
    from vllm import SamplingParams

    llm, (state, _) = engine.llm_engine, ends(engine)
    asked = {"temperature": 0, "max_tokens": count, "ignore_eos": True, "extra_args": extra or None}
    for name, prompt in prompts.items():
        llm.add_request(name, {"prompt_token_ids": list(prompt)}, SamplingParams(**asked))
    found, steps, owned, pool = {}, 0, [], state.manager.block_pool
    give = pool.get_new_blocks

    def giving(count: int) -> object:
        given = give(count)
        owned.append(HELD - pool.get_num_free_blocks())
        return given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "get_new_blocks", giving)
        while llm.has_unfinished_requests():
            for answer in llm.step():
                ended = answer.outputs[0]
                found[answer.request_id] = list(ended.token_ids)
                assert not answer.finished or ended.finish_reason == "length", ended.finish_reason
            steps += 1
            assert steps < 3000, "no progress"
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 == HELD
    return found, max(owned)


@torch.no_grad()
def by_chunks(folder: str, policy: str, prompt: Sequence[int], count: int) -> list[int]:
    """Generate greedily in transformers, with a prompt that is read in the same chunks."""
    from transformers import AutoModelForCausalLM

    from kv_transformers import CompressedCache, passing

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = passing(model, CompressedCache(model, policy))
    for i in range(0, len(prompt), CHUNK):
        logits = model(torch.tensor([prompt[i : i + CHUNK]]), **cache).logits
    found: list[int] = []
    for _ in range(count):
        found.append(int(logits[0, -1].argmax()))
        logits = model(torch.tensor([found[-1:]]), **cache).logits
    return found


def check_long(engine: "LLM", folder: str, policy: str, prompt: Sequence[int]) -> None:
    """Compare a prompt that is longer than the memory with transformers."""
    assert ends(engine)[0].manager.blocks_for(len(prompt)) > 2 * HELD
    found, owned = run(engine, {"a": prompt}, 6)
    assert found["a"] == by_chunks(folder, policy, prompt, 6)
    assert owned == MOST


def test_a_prompt_longer_than_the_memory_is_read_as_in_transformers(
    small: "LLM", weights: str, document: list[int]
) -> None:
    check_long(small, weights, STREAMING, document)


def test_two_such_prompts_at_once_are_both_answered(small: "LLM", document: list[int]) -> None:
    later = document[-3 * CHUNK :]
    alone, _ = run(small, {"a": document}, 4)
    found, _ = run(small, {"a": document, "b": later}, 4)
    assert found["a"] == alone["a"]
    assert len(found["b"]) == 4


def test_a_request_has_a_budget_of_its_own_within_the_memory(
    small: "LLM", document: list[int]
) -> None:
    one, _ = run(small, {"a": document}, 4, kv_budget=BUDGET)
    few, owned = run(small, {"a": document}, 4, kv_budget=20)
    assert one["a"] != few["a"]
    assert owned < MOST
    run(small, {"a": document[:CHUNK]}, 4, kv_budget=10**6)  # all of it fits
    with pytest.raises(AssertionError, match="error"):
        run(small, {"a": document}, 4, kv_budget=10**6)
    assert run(small, {"a": document}, 4)[0]["a"] == one["a"]


@pytest.mark.parametrize(
    ("policy", "blocks", "sentence"),
    [
        ("streaming:budget=48,chunks=true", MOST - 1, "max seq len"),
        ("streaming:budget=48", MOST, "256 tokens takes 16 blocks until it is compressed, but"),
    ],
)
def test_an_engine_that_could_not_read_the_longest_prompt_is_refused(
    start: Start, tiny: Callable[..., str], policy: str, blocks: int, sentence: str
) -> None:
    size = memory(blocks, 2, 2, 32)
    options = OPTIONS | {"max_model_len": 256, "skip_tokenizer_init": True, "load_format": "dummy"}
    with (
        pytest.raises(ValueError, match=sentence),
        start(tiny(), policy, kv_cache_memory_bytes=size, **options),
    ):
        pass
    # A prompt that is planned by chunk needs no more than this, however long it may be.
    if "chunks" in policy:
        with start(tiny(), policy, kv_cache_memory_bytes=memory(MOST, 2, 2, 32), **options) as one:
            assert ends(one)[0].manager.block_pool.num_gpu_blocks - 1 == MOST


@pytest.fixture
def gated(start: Start, smollm2: str) -> Iterator["LLM"]:
    """Start an engine of a real model under a policy that shares a budget among heads."""
    with start(smollm2, POLICY, kv_cache_memory_bytes=memory(HELD, 30, 3, 64), **OPTIONS) as engine:
        yield engine


@pytest.fixture
def natural(smollm2: str) -> list[int]:
    """Return five chunks of tokens of a natural text."""
    from transformers import AutoTokenizer

    from kv_eval.tasks import default_text

    ids: list[int] = AutoTokenizer.from_pretrained(smollm2).encode(default_text().body)
    return ids[: 5 * CHUNK]


@pytest.mark.model
@NEEDS_TOKENIZER
def test_a_gate_shares_the_budget_among_the_heads_of_a_real_model(
    gated: "LLM", smollm2: str, natural: list[int]
) -> None:
    check_long(gated, smollm2, POLICY, natural)


@pytest.mark.slow  # test_worker.py has it without a model
@pytest.mark.model
def test_an_answer_that_outgrows_the_memory_is_read_again_and_goes_on(
    gated: "LLM", natural: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = gated.llm_engine.engine_core.engine_core.scheduler
    preempt, times = scheduler._preempt_request, []

    def preempting(request: object, *more: object, **options: object) -> None:
        times.append(request)
        preempt(request, *more, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", preempting)
    count = HELD * BLOCK
    found, _ = run(gated, {"a": natural[: 3 * CHUNK]}, count)
    assert len(found["a"]) == count
    assert times
