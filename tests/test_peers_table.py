"""From rows of answers to scores, to what a cell lacks, and to who is best in it."""

import pytest
from _partial import Partial
from _table import (
    cell_rows,
    choices,
    earlier,
    environments,
    figures,
    joined,
    lacking,
    missing,
    of_cells,
    to_ask,
    ways,
)
from _ways import WAYS, asked
from _work import FULL, named

from kv_eval.evaluate.intervals import of_change
from kv_eval.tasks import Sample

CELL = ("needle", "aware")


def sample(answer: str) -> Sample:
    return Sample("needle", "aware", (1,), (2,), answers=(answer,), new_tokens=4)


def answers(partial: Partial, environment: str, way: str, tokens: list[int], share: int) -> None:
    for i, token in enumerate(tokens):
        held_bytes = {"kv_bytes": share, "storage_bytes": share, "full_bytes": 100}
        row = {**named((way, *CELL, i)), **held_bytes, "tokens": [token], "seconds": 0.5}
        partial.take(environment, "c", row)


@pytest.fixture
def table() -> list[dict[str, object]]:
    """Two samples, of which 41 and 42 are right."""
    partial = Partial(None, {})
    answers(partial, "ours", FULL, [41, 42], 100)
    answers(partial, "ours", "k8v4", [41, 42], 41)
    answers(partial, "ours", "k4v2", [41, 0], 22)
    answers(partial, "kvpress", FULL, [41, 42], 100)
    answers(partial, "kvpress", "snapkv:keep=0.25", [0, 0], 25)
    answers(partial, "kvpress", "adakv-expected-attention:keep=0.25", [41, 42], 104)
    partial.take("quantized", "c", {**named(("hqq2", *CELL, 0)), "error": "no"})
    partial.take("quantized", "c", {**named(("hqq2", *CELL, 1)), "error": "no"})
    answers(partial, "quantized", "quanto4", [41], 28)
    samples = {CELL: (sample("41"), sample("42"))}
    return ways(partial, samples, CELL, lambda tokens: " ".join(map(str, tokens)))


def test_a_way_is_judged_by_all_samples_or_not_at_all(table: list[dict[str, object]]) -> None:
    scores = {row["way"]: row["score"] for row in table if row["kind"] == "way"}
    assert scores == {
        FULL: 1.0,
        "k8v4": 1.0,
        "k4v2": 0.5,
        "snapkv:keep=0.25": 0.0,
        "adakv-expected-attention:keep=0.25": 1.0,
    }
    (failed,) = (row for row in table if row["kind"] == "failed")
    assert (failed["way"], failed["samples"], failed["why"]) == ("hqq2", 2, "no")


def test_what_is_hidden_is_held(table: list[dict[str, object]]) -> None:
    chosen = {row["budget"]: row for row in choices(table, CELL)}
    assert set(chosen) == {0.5, 0.25}  # nothing holds an eighth
    half = chosen[0.5]
    assert (half["ours_way"], half["ours"]) == ("ours: k8v4", 1.0)
    assert (half["peer_way"], half["peer"]) == ("kvpress: snapkv:keep=0.25", 0.0)
    assert half["freed_way"] == "kvpress: adakv-expected-attention:keep=0.25"
    assert half["winner"] == "ours"
    assert half["difference"] == of_change((1.0, 1.0), (0.0, 0.0))
    assert figures(list(chosen.values())) == {
        "needle_aware_ours_50": 1.0,
        "needle_aware_best_peer_50": 0.0,
        "needle_aware_ours_25": 0.5,
        "needle_aware_best_peer_25": 0.0,
    }


def test_without_a_full_cache_only_right_answers_are_judged() -> None:
    partial = Partial(None, {})
    answers(partial, "kvzip", "kvzip:keep=0.5", [41, 42], 104)
    given = (CELL, lambda tokens: " ".join(map(str, tokens)))
    (row,) = ways(partial, {CELL: (sample("41"), sample("42"))}, *given)
    assert row["scores"] == [1.0, 1.0]
    compared = Sample("needle", "aware", (1,), (2,), new_tokens=1)
    assert not ways(partial, {CELL: (compared, compared)}, *given)
    answers(partial, "kvpress", FULL, [41, 7], 100)
    found = ways(partial, {CELL: (compared, compared)}, *given)
    assert {row["way"]: row["scores"] for row in found} == {
        FULL: [1.0, 1.0],
        "kvzip:keep=0.5": [1.0, 0.0],
    }


def whole(score: float, *environments: str) -> list[dict[str, object]]:
    """All ways of some environments, with the same score of both samples."""
    return [
        {"kind": "environment", "environment": environment, "commits": [str(score)]}
        if way is None
        else {
            **{"kind": "way", "environment": environment, "way": way, "score": score},
            **{"held": 0.2, "scores": [score, score]},
        }
        for environment in environments or WAYS
        for way in (None, *asked(environment, "aware", quick=False))
    ]


def test_a_cell_says_what_it_lacks() -> None:
    ours, peers = len(WAYS["ours"]), len(WAYS["kvpress"])
    said = missing(whole(1.0, "quantized", "vllm", "kvpress")[:-1], CELL, False)
    assert said == [
        f"needle aware: {ours} of {ours} ways of ours",
        f"needle aware: 1 of {peers} ways of kvpress",
    ]
    assert not missing(whole(1.0), CELL, False)
    assert missing(whole(1.0), ("needle", "agnostic"), False) == [
        "needle agnostic: 3 of 3 ways of kvzip"
    ]


def test_gaps_are_filled_beside_what_they_are_compared_with() -> None:
    last = WAYS["ours"][-1]
    gap = [row for row in whole(1.0) if row.get("way") != last]
    assert lacking(gap, CELL, False) == to_ask(gap, CELL, False) == {"ours": (last,)}
    agnostic = ("nll", "agnostic")
    assert to_ask(whole(1.0), CELL, False) == {}
    assert to_ask(gap, agnostic, False) == {
        "ours": (FULL, last),
        "kvzip": WAYS["kvzip"],
        "kvpress": (FULL,),
    }
    plain = [{k: v for k, v in row.items() if k != "scores"} for row in whole(0.5)]
    assert to_ask(plain, CELL, False) == {
        name: asked(name, "aware", quick=False) for name in WAYS if name != "kvzip"
    }


def test_a_part_that_is_answered_anew_is_joined_to_the_rest() -> None:
    rows = joined(whole(1.0, "ours"), whole(0.5))
    assert {row["environment"] for row in rows if row.get("score") == 1.0} == {"ours"}
    assert {row["environment"] for row in rows if row.get("score") == 0.5} == set(WAYS) - {
        *("ours", "kvzip")
    }
    assert [row["commits"] for row in rows if row.get("commits") and row["environment"] == "ours"]
    half = joined(whole(1.0, "ours")[:5], whole(0.5))
    commits = [row["commits"] for row in half if "commits" in row and row["environment"] == "ours"]
    assert commits == [["0.5"], ["1.0"]]
    plain = [{k: v for k, v in row.items() if k != "scores"} for row in whole(0.5)]
    assert joined(whole(1.0, "ours"), plain) == whole(1.0, "ours")


def test_who_is_best_is_said_of_a_whole_cell_and_one_that_was_whole_stays() -> None:
    first = cell_rows(whole(0.5, "kvpress", "vllm"), [], CELL, False)
    assert not [row for row in first if row["kind"] == "choice"]
    then = cell_rows(whole(1.0, "ours", "quantized"), first, CELL, False)
    assert [row["ours"] for row in then if row["kind"] == "choice"] == [1.0, 1.0]
    again = cell_rows(whole(0.25, "ours"), then, CELL, False)
    assert [row["ours"] for row in again if row["kind"] == "choice"] == [0.25, 0.25]
    plain = [{k: v for k, v in row.items() if k != "scores"} for row in then]
    assert cell_rows(whole(0.25, "ours"), plain, CELL, False) == plain


def test_a_cell_says_with_what_it_was_measured() -> None:
    partial = Partial(None, {})
    row = {"way": FULL, "task": "needle", "sample": 0, "seconds": 90.0}
    partial.take("kvpress", "later", {**row, "setting": "aware", "sample": 1})
    partial.take("kvpress", "first", {**row, "setting": "aware"})
    partial.take("kvpress", "other", {**row, "setting": "agnostic"})
    partial.take("kvpress", "first", {"versions": {"kvpress": "0.5.5"}})
    (found,) = environments(partial, ("needle", "aware"))
    assert found["commits"] == ["first", "later"]
    assert found["minutes"] == 3.0
    assert found["versions"] == {"kvpress": "0.5.5"}


def test_one_task_anew_leaves_the_others_as_they_were() -> None:
    about = {"kind": "about", "samples": "s", "model": "m"}
    cells = [("needle", "aware"), ("needle", "agnostic"), ("nll", "agnostic")]
    rows = [
        {"task": task, "setting": setting, "score": i} for i, (task, setting) in enumerate(cells)
    ]
    before = earlier([about, *rows], about)
    assert of_cells(before, {cells[0], cells[2]}) == [rows[0], rows[2]]
    with pytest.raises(ValueError, match="move it away"):
        earlier([about, *rows], {**about, "samples": "other"})
