"""Documents in files: loaded when an engine starts, and continued by requests."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from asking import COUNT, LARGE, asked, in_parts, pages
from live_engine import ends
from written import answer, written

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]


@pytest.mark.parametrize(
    "policy",
    ["k8v4:window=8", "k4v4:keys=channel,block=16", "kv-compress:rate=2,floor=16", "leankv"],
)
def test_a_document_is_continued_as_in_transformers(
    start: Start, weights: str, prompts: list[list[int]], tmp_path: Path, policy: str
) -> None:
    book, other = prompts[0][:100], prompts[1][:61]
    written(weights, policy, other, tmp_path / "another.kv")
    model, cache = written(weights, policy, book, tmp_path / "book.kv")
    expected = answer(model, cache, prompts[2][:20])
    given = {"kv_policy": policy, "kv_poison": True, "kv_documents": str(tmp_path)}
    with start(weights, **LARGE, additional_config=given) as engine:
        for _ in range(2):
            assert asked(engine, [book + prompts[2][:20]], COUNT) == [(expected, 100)]
        assert asked(engine, [[*other, 5]], 1)[0][1] == 61
        assert asked(engine, [book[:-1]], 1)[0][1] == 0
        state, worker = ends(engine)
        assert state.manager.prefixes is not None
        held, request = pages(engine)
        assert worker.pool.used == held + request
        own = sum(len(each.blocks) for each in state.manager.prefixes.stored.values())
        assert own == state.manager.prefixes.loaded_blocks
        assert own * state.manager.account.block_pages >= held
        pool = state.manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - own
        assert engine.llm_engine.reset_prefix_cache(reset_connector=True) in (True, False)
        assert asked(engine, [book + prompts[2][:20]], COUNT)[0][1] == 0
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_a_request_that_names_a_boundary_continues_a_document(
    start: Start, weights: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    policy, book, more = "kv-compress:rate=2,floor=16", prompts[0][:60], prompts[1][:30]
    expected = in_parts(weights, policy, [book, more, prompts[2][:20]], 0)[-1]
    written(weights, policy, book, tmp_path / "book.kv")
    given = {"kv_policy": policy, "kv_poison": True, "kv_documents": str(tmp_path)}
    prompt = book + more + prompts[2][:20]
    with start(weights, **LARGE, additional_config=given) as engine:
        for read in (60, 90):
            assert asked(engine, [prompt], COUNT, kv_prefix=90) == [(expected, read)]
        assert asked(engine, [prompt], 1)[0][1] == 60  # it names no boundary
        assert asked(engine, [prompt], 1, kv_prefix=40)[0][1] == 60  # the longest one


def test_files_that_no_request_could_continue_are_refused(
    start: Start, weights: str, tiny: Callable[..., str], prompts: list[list[int]], tmp_path: Path
) -> None:
    policy = "kv-compress:rate=2,floor=16"
    book = prompts[0][:40]

    def starting(said: str, model: str = weights, text: str = policy, **options: object) -> None:
        given = {"kv_policy": text, "kv_documents": str(tmp_path)}
        with (
            pytest.raises(Exception, match=said),
            start(model, **LARGE | options, additional_config=given),
        ):
            pass

    starting(r"there is no file \*.kv in such a folder; write one with `kv-serve compress")
    path = tmp_path / "book.kv"
    written(weights, policy, book, path, private=True)
    starting("has several sequences, or no token ids to compare with theirs")
    written(weights, policy, book, path)
    starting("is under the policy kv-compress.*, but .*leankv.* was given", text="leankv")
    starting("into which no file is loaded", text="k8v4")
    starting("prefix caching is disabled in this engine", enable_prefix_caching=False)
    starting("was compressed with the model", model=tiny(), load_format="dummy")
    path.write_bytes(path.read_bytes()[:-100])
    starting("damaged")
    written(weights, policy, book, path)
    (tmp_path / "copy.kv").write_bytes(path.read_bytes())
    starting("copy.kv cannot be served: its tokens are those of another document")
