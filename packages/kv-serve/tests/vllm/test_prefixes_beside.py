"""Stored prefixes of models with layers that vLLM keeps: windows, chunks and states."""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asking import arriving, asked, expect_consistent, in_parts, reset, stored
from kept_models import ALONE, BLOCK, options
from live_engine import ends
from written import answer, written

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.core.block_pool import BlockPool

Start = Callable[..., AbstractContextManager["LLM"]]
Drawn = Callable[..., str]
# A token that is not a number would stay one where its weight is 0, so that other layers' free
# blocks are filled with a large number: 0x4B4B4B4B is 13 million.
FREE = 0x4B
MARK = 90  # within a block of every layer, behind the first chunk, and longer than a window
COUNT = 10
WINDOW = 48


@pytest.fixture(autouse=True)
def _free_blocks_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite blocks as soon as vLLM's pool has them again."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.v1.core.block_pool import BlockPool

    free = BlockPool.free_blocks

    @functools.wraps(free)  # signatures are compared
    def freed(self: "BlockPool", blocks: Any) -> None:
        given = list(blocks)
        free(self, given)
        left = [each.block_id for each in given if each.ref_cnt == 0 and not each.is_null]
        if left and has_kv_transfer_group():
            get_kv_transfer_group().worker.memory.regions[:, left] = FREE

    monkeypatch.setattr(BlockPool, "free_blocks", freed)


@pytest.fixture
def engine_of(start: Start, drawn: Drawn) -> Callable[..., AbstractContextManager["LLM"]]:
    """Start an engine of a model under a policy."""

    @contextmanager
    def running(
        name: str, policy: str, turns: bool = False, documents: str | None = None, **more: Any
    ) -> Iterator["LLM"]:
        given = {"kv_policy": policy, "kv_poison": True, "kv_turns": turns}
        given |= {} if documents is None else {"kv_documents": documents}
        own = options(max_num_batched_tokens=64) | ALONE.get(name, {}) | more
        with start(drawn(name), additional_config=given, **own) as engine:
            yield engine

    return running


Engines = Callable[..., AbstractContextManager["LLM"]]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Random texts, several windows long."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, 256, (n,), generator=draw).tolist() for n in (300, 129, 60)]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("gemma3", "k8v4:window=8"),
        ("gemma3_full", "snapkv:budget=40,window=4+k8v4"),  # several groups of both kinds
        ("granite4", "leankv:window=8"),
        ("llama4", "kv-compress:rate=2,floor=16,short=true+k8v4"),
        *(
            pytest.param(name, policy, marks=pytest.mark.slow)
            for name, policy in [
                ("gpt_oss", "snapkv:budget=40,window=4+k8v4"),
                ("gemma3n", "k4v4:keys=channel,block=16"),
                ("gemma4_shared", "leankv:window=8"),
                ("olmo3", "h2o:budget=40"),
            ]
        ),
    ],
)
def test_a_hit_answers_as_the_request_that_read_the_prefix(
    engine_of: Engines, texts: list[list[int]], name: str, policy: str
) -> None:
    book, more = texts[0][:MARK], texts[1]
    questions = [book + more[i : i + 10 + 3 * i] for i in range(4)]  # which fit in one step
    with engine_of(name, policy) as engine:
        cold = []
        for each in questions:
            reset(engine)
            cold += asked(engine, [each], COUNT, kv_prefix=MARK)
        assert [read for _, read in cold] == [0] * 4
        reset(engine)
        first, *others = [asked(engine, [each], COUNT, kv_prefix=MARK)[0] for each in questions]
        assert first == cold[0]
        assert others == [(ids, MARK) for ids, _ in cold[1:]]
        together = asked(engine, questions, COUNT, kv_prefix=MARK)
        assert together == [(ids, MARK) for ids, _ in cold]
        reset(engine)  # one reads it, the others wait
        waited = asked(engine, questions, COUNT, kv_prefix=MARK)
        assert [ids for ids, _ in waited] == [ids for ids, _ in cold]
        assert sorted(read for _, read in waited) == [0, *[MARK] * 3]
        (prefix,) = stored(engine).stored.values()
        assert stored(engine).other_bytes == len(prefix.others) * (
            ends(engine)[1].memory.regions[:, 0].numel()
        )
        expect_consistent(engine)


@pytest.mark.parametrize(
    ("name", "boundary"), [("gemma3", 2 * BLOCK), ("gemma3", 20), ("granite4", 64), ("llama4", 96)]
)
def test_boundaries_at_blocks_chunks_and_before_the_first_window(
    engine_of: Engines, texts: list[list[int]], name: str, boundary: int
) -> None:
    prompt = texts[0][: boundary + 30]
    with engine_of(name, "snapkv:budget=16,window=4+k8v4") as engine:
        (cold,) = asked(engine, [prompt], COUNT, kv_prefix=boundary)
        assert asked(engine, [prompt], COUNT, kv_prefix=boundary) == [(cold[0], boundary)]
        expect_consistent(engine)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("gemma3", "snapkv:budget=24,window=8+k8v4"),
        ("gemma3", "k8v4:window=8"),
        ("granite4", "kv-compress:rate=2,floor=16"),
    ],
)
def test_parts_and_turns_are_those_of_transformers(
    engine_of: Engines, drawn: Drawn, texts: list[list[int]], name: str, policy: str
) -> None:
    folder = drawn(name)
    with engine_of(name, policy, turns=True, max_num_batched_tokens=512) as engine:
        pages = ends(engine)[0].manager.account.page_tokens
        book, question = texts[0][:MARK], texts[1][:25]
        expected = in_parts(folder, policy, [book, question], 0, pages)[-1]
        for read in (0, MARK):
            assert asked(engine, [book + question], COUNT, kv_prefix=MARK) == [(expected, read)]
        reset(engine)
        turns = [texts[0][:60], texts[1][:20], texts[2][:15]]
        expected = in_parts(folder, policy, turns, COUNT, pages)
        told: list[int] = []
        for turn, answer in zip(turns, expected, strict=True):
            read = max(0, len(told) - 1)
            told += turn
            assert asked(engine, [told], COUNT) == [(answer, read)]
            told += answer
        expect_consistent(engine)


@pytest.mark.parametrize("turns", [False, True])
def test_prefixes_are_dropped_for_requests_that_lack_blocks(
    engine_of: Engines, texts: list[list[int]], turns: bool
) -> None:
    few = {"kv_cache_memory_bytes": 30 * 2 * BLOCK * 512, "max_model_len": 320}
    extra = {} if turns else {"kv_prefix": 61}
    with engine_of("gemma3", "snapkv:budget=64,window=4+k8v4", turns, **few) as engine:
        books = [[i + 3, *texts[0][:60]] for i in range(14)]
        cold = []
        for each in books:
            cold += asked(engine, [[*each, 4, 5]], 6, **extra)
        kept = len(stored(engine).stored)
        assert 0 < kept < 14
        again = []
        for each in reversed(books):
            again += asked(engine, [[*each, 4, 5]], 6, **extra)
        assert [ids for ids, _ in again] == [ids for ids, _ in reversed(cold)]
        if not turns:
            found = [read for _, read in again]
            assert 0 < found.count(61) < 14
            assert found[0] == 61
        (longest,) = asked(engine, [texts[0][:300]], 19)  # takes what prefixes had
        assert len(longest[0]) == 19
        assert len(stored(engine).stored) < kept
        expect_consistent(engine)


@pytest.mark.parametrize(
    ("name", "policy", "chunk", "blocks"),
    [
        ("gemma3", "streaming:budget=4096", 64, 60),
        ("gemma3", "k8v4:window=8", 4096, 60),  # what is compressed depends on chunks
        ("gemma3_full", "kv-compress:rate=2,floor=16,short=true+k8v4", 64, 60),
        ("granite4", "snapkv:budget=64,window=8+k8v4", 4096, 18),
    ],
)
def test_requests_that_come_and_go_answer_as_alone(
    engine_of: Engines,
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    policy: str,
    chunk: int,
    blocks: int,
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, again = Scheduler._preempt_request, set()  # these read their answers as prompts

    def preempted(self: Scheduler, request: Any, *more: Any, **how: Any) -> None:
        again.add(request.request_id.partition("-")[0])
        preempt(self, request, *more, **how)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempted)
    draw = random.Random(3)
    books = [[i + 3, *texts[0][: 40 + 23 * i]] for i in range(4)]
    own = {"max_model_len": 320, "max_num_batched_tokens": chunk}
    with engine_of(name, policy, **own) as probe:
        each = ends(probe)[1].memory.regions[:, 0].numel()
    with engine_of(name, policy, kv_cache_memory_bytes=blocks * each, **own) as engine:
        requests = {}
        for i in range(18):
            book, begin = draw.choice(books), draw.randrange(60)
            prompt = book + texts[1][begin : begin + draw.randint(1, 30)]
            requests[f"{i}"] = prompt, len(book), draw.randint(1, 60)
        answers = arriving(engine, requests, draw)
        assert len(answers) > 9
        assert again or name == "granite4"  # of which few are admitted at once
        assert stored(engine).counts().hits > 3
        if "short" not in policy:  # what is kept depends on when blocks are short
            for one in draw.sample(sorted(answers.keys() - again), 3):
                prompt, mark, count = requests[one]
                reset(engine)
                assert asked(engine, [prompt], count, kv_prefix=mark) == [(answers[one], 0)]
        expect_consistent(engine)


@pytest.mark.parametrize(
    ("name", "policy", "length"),
    [
        ("gemma3", "k8v4:window=8", 100),
        ("gemma3_full", "snapkv:budget=40,window=4+k8v4", 30),  # shorter than a window
    ],
)
def test_a_document_is_continued_as_in_transformers(
    engine_of: Engines,
    drawn: Drawn,
    texts: list[list[int]],
    tmp_path: Path,
    name: str,
    policy: str,
    length: int,
) -> None:
    book, question, folder = texts[0][:length], texts[1][:20], drawn(name)
    model, cache = written(folder, policy, book, tmp_path / "book.kv")
    expected = answer(model, cache, question)
    own = {"max_num_batched_tokens": 512, "documents": str(tmp_path)}
    with engine_of(name, policy, **own) as engine:
        for _ in range(2):
            assert asked(engine, [book + question], COUNT) == [(expected, length)]
        assert asked(engine, [book + question], 1, kv_prefix=length + 5)[0][1] == length
        assert asked(engine, [book[:-1]], 1)[0][1] == 0
        expect_consistent(engine)
        assert asked(engine, [book + question], COUNT)[0][1] == 0  # as weights may have changed


@pytest.mark.parametrize("name", ["llama4", "granite4"])
def test_documents_are_refused_beside_chunks_and_states(
    start: Start, drawn: Drawn, tmp_path: Path, name: str
) -> None:
    (tmp_path / "book.kv").write_bytes(b"")  # refused before it is read
    given = {"kv_policy": "snapkv:budget=24,window=8", "kv_documents": str(tmp_path)}
    own = options(load_format="dummy") | ALONE.get(name, {})
    kind = {"llama4": "ChunkedLocalAttentionSpec", "granite4": "MambaSpec"}[name]
    with (
        pytest.raises(Exception, match=f"kv_documents is given, but a layer .* has a {kind}"),
        start(drawn(name, weights=False), **own, additional_config=given),
    ):
        pass


def test_a_file_has_the_windows_of_all_layers_and_no_more() -> None:
    from vllm.model_executor.layers.attention import Attention

    from kv_serve.vllm.loaded_windows import LoadedWindows, WindowLayer

    layer = Attention.__new__(Attention)
    layer.num_kv_heads, layer.head_size, layer.head_size_v = 2, 32, 32
    windows = LoadedWindows((WindowLayer("own.0", 0, layer, BLOCK, WINDOW - 1),))
    for tokens, held in ((100, 47), (20, 20)):
        there = torch.zeros(1, 2, held, 32)
        whole = {"own.0.key": there, "own.0.value": there}
        windows.expect(whole, tokens)
        for wrong, said in (
            ({"own.0.key": there}, r"own.0.value should be floats of .*, found None"),
            (whole | {"own.0.key": there[:, :, 1:]}, f"own.0.key should be floats of .*, {held}, "),
            (whole | {"own.0.key": there.long()}, "own.0.key should be floats"),
            (whole | {"own.1.key": there}, "own.1.key is of no layer that vLLM keeps"),
        ):
            with pytest.raises(ValueError, match=said):
                windows.expect(wrong, tokens)


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_a_boundary_needs_prefix_caching_beside_windows(
    start: Start, drawn: Drawn, name: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    off = options(load_format="dummy", enable_prefix_caching=False)
    with (
        start(drawn(name, weights=False), "snapkv:budget=24,window=8", **off) as engine,
        pytest.raises(VLLMValidationError, match="kv_prefix needs prefix caching"),
    ):
        asked(engine, [[4, 5, 6]], 2, kv_prefix=2)


def test_one_format_beside_states_has_no_prefixes(start: Start, drawn: Drawn) -> None:
    from vllm.exceptions import VLLMValidationError

    own = options(load_format="dummy") | ALONE["granite4"]
    with (
        start(drawn("granite4", weights=False), "k8v4", **own) as engine,
        pytest.raises(VLLMValidationError, match="kv_prefix needs prefix caching"),
    ):
        asked(engine, [[4, 5, 6]], 2, kv_prefix=2)
