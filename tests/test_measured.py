"""The figures that `kv-serve recommend` goes by are those of results."""

import copy
import tomllib

import pytest

from kv_eval.cli.recommend import search
from kv_transformers.search import GROUP, PACKAGE
from tools import measured
from tools.workspace import ROOT


def test_the_shipped_file_is_what_the_results_say() -> None:
    assert measured.PATH.read_bytes() == measured.written(), "run python -m tools.measured"


def test_other_results_give_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measured.result

    def other(name: str) -> dict[str, object]:
        found = copy.deepcopy(dict(real(name)))
        for row in found["rows"]:
            if row["kind"] == "way" and row["way"] == "k8v4" and row["task"] == "nll":
                row["scores"][0] += 0.1
        return found

    monkeypatch.setattr(measured, "result", other)
    assert measured.PATH.read_bytes() != measured.written()


def test_the_search_is_the_entry_point_that_the_command_looks_for() -> None:
    project = tomllib.loads((ROOT / "packages" / PACKAGE / "pyproject.toml").read_text())["project"]
    found = project["entry-points"][GROUP]
    assert found == {"policies": f"{search.__module__}:{search.__qualname__}"}


def test_windows_of_a_result_of_our_own_are_compared_with_the_full_cache() -> None:
    row = {"kind": "policy", "length": 50}
    rows = [
        {**row, "policy": "full", "nats": [2.0, 3.0, 4.0]},
        {**row, "policy": "k8v4:window=0", "nats": [2.5, 3.0, 4.1]},
        {"kind": "other"},
    ]
    (figure,) = measured.of_windows("kld", rows)
    assert (figure.policy, figure.windows, figure.length) == ("k8v4", 3, 50)
    assert figure.loss == pytest.approx(0.2, abs=1e-6)
    assert 0 <= figure.interval[0] < 0.2 < figure.interval[1] <= 0.5


def test_numbers_are_paired_with_those_of_the_full_cache() -> None:
    row = {"way": "k4v2", "task": "needle", "setting": "aware", "score": 0.75}
    found = measured.of_numbers(row, {**row, "score": 1.0}, 16)
    assert (found.samples, found.found, found.full_found, found.lost) == (16, 12, 16, True)
    with pytest.raises(ValueError, match="k4v2 on needle has no answers that can be paired"):
        measured.of_numbers(row, {**row, "score": 0.5}, 16)
    scores = {**row, "score": 0.5, "scores": [1.0, 0.0]}
    found = measured.of_numbers(scores, {**scores, "scores": [0.0, 1.0]}, 16)
    assert (found.samples, found.found, found.full_found, found.lost) == (2, 1, 1, False)
