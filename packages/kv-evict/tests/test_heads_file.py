"""Files of head scores: which heads retrieve, and what is refused."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evict_cases import quick
from heads_cases import scores_of, written
from kv_evict.heads_file import KINDS, HeadScores, load, save
from kv_policy import CacheShape, NotCalibratedError
from kv_policy.tensor_files import write

CPU = torch.device("cpu")


@given(
    layers=st.integers(1, 6),
    heads=st.integers(1, 5),
    seed=st.integers(0, 99),
    share=st.sampled_from([0.0, 0.01, 0.14, 0.5, 0.75, 1.0]),
)
@quick
def test_a_share_of_the_heads_with_the_highest_scores_retrieves(
    layers: int, heads: int, seed: int, share: float
) -> None:
    found = scores_of(layers, heads, seed)
    marked = found.retrieving((("echo", share),), CPU)
    count = int(marked.sum())
    assert math.ceil(share * layers * heads - 1e-9) == count
    score = found.scores["echo"]
    if 0 < count < layers * heads:
        assert score[marked].min() >= score[~marked].max()


def test_heads_of_several_kinds_retrieve_together() -> None:
    found = scores_of(4, 3)
    first = found.retrieving((("induction", 0.25),), CPU)
    second = found.retrieving((("echo", 0.25),), CPU)
    both = found.retrieving((("induction", 0.25), ("echo", 0.25)), CPU)
    assert torch.equal(both, first | second)


def test_of_equal_scores_those_of_earlier_layers_count() -> None:
    found = scores_of(2, 2)
    flat = HeadScores(found.facts, {kind: torch.ones(2, 2) for kind in KINDS})
    assert flat.retrieving((("loss", 0.5),), CPU).tolist() == [[True, True], [False, False]]


def test_a_file_holds_what_was_saved(tmp_path: Path) -> None:
    saved = scores_of(3, 2, seed=4)
    save(tmp_path / "heads", saved)
    found = load("razor", str(tmp_path / "heads"))
    assert found.facts == saved.facts
    assert all(torch.equal(found.scores[kind], saved.scores[kind]) for kind in KINDS)
    assert load("razor", str(tmp_path / "heads")) is found


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = written(tmp_path / "heads", 2, 2, seed=0)
    before = load("razor", file)
    written(tmp_path / "heads", 2, 2, seed=1)
    os.utime(file, ns=(1, 1))
    assert not torch.equal(load("razor", file).scores["echo"], before.scores["echo"])


def test_a_missing_file_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(NotCalibratedError, match="kv-serve calibrate heads --model MODEL --out"):
        load("razor", str(tmp_path / "none"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "other", "kv-evict gate 2", "{}", {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="kv-serve calibrate heads"):
        load("razor", str(tmp_path / "other"))
    write(tmp_path / "empty", "kv-evict heads 1", "{}", {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="has an invalid header"):
        load("razor", str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            torch.zeros(2, 3),
            r"echo should be float32 of \(2, 2\), and is torch.float32 of \(2, 3\)",
        ),
        (torch.zeros(2, 2, dtype=torch.float64), "and is torch.float64"),
        (torch.full((2, 2), torch.nan), "a score is infinite or NaN"),
    ],
)
def test_wrong_scores_are_not_saved(tmp_path: Path, score: torch.Tensor, message: str) -> None:
    found = scores_of(2, 2)
    wrong = replace(found, scores={**found.scores, "echo": score})
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "heads", wrong)
    assert not (tmp_path / "heads").exists()


def test_another_model_is_refused() -> None:
    found = scores_of(2, 4)
    found.expect("razor", CacheShape(2, 2, 1, 8, 8, first_head=2))
    with pytest.raises(ValueError, match=r"razor: .* a model with 2 layers, but this cache has 3"):
        found.expect("razor", CacheShape(3, 4, 1, 8, 8))
    with pytest.raises(ValueError, match="a model with 4 KV heads, but this cache has 5"):
        found.expect("razor", CacheShape(2, 5, 1, 8, 8))
