"""Calibration: what is tried, what counts as a loss, what is chosen, and what is written."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import kv_eval.evaluate.runner as runner
from closed_pipe import run_unread
from kv_eval.calibrate.grid import PAIRS, T_HIGH, T_LOW, Setting, grid
from kv_eval.calibrate.loss import Loss, loss
from kv_eval.calibrate.search import Point, Search, choose, frontier, write_profile
from kv_eval.evaluate.journal import Finished, Journal
from kv_policy import parse
from kv_serve.cli import app
from kv_transformers import CompressedCache
from kv_transformers.models import LoadedModel

SETTING = Setting("k8v4", "k4v2", 0.1, 0.01)


def test_the_papers_grid_has_every_pair_of_thresholds_that_makes_sense() -> None:
    found = grid()
    assert len(found) == len(set(found)) == 3 * (3 + 4 * 4) + 5
    assert {(s.high, s.low) for s in found} == set(PAIRS)
    assert all(s.t_low <= s.t_high for s in found)
    assert {s.t_high for s in found} == set(T_HIGH)
    assert {s.t_low for s in found} == set(T_LOW)
    assert all(s.t_low == 0 for s in found if s.low == "drop")


def test_every_setting_is_a_policy_that_says_the_same() -> None:
    settings = (*grid(), *grid([("k4v4:keys=channel", "k4v2")], [0.3], [0.0], last=None))
    for setting in settings:
        policy = parse(setting.spec)
        for name in Setting.__dataclass_fields__:
            assert getattr(policy, name) == getattr(setting, name), setting.spec


def test_what_cannot_be_tried() -> None:
    with pytest.raises(ValueError, match=r"t_high=1.5 is not a share"):
        grid(t_high=[1.5])
    with pytest.raises(ValueError, match="no setting to try: every t_low is above every t_high"):
        grid(t_high=[0.01], t_low=[0.1], pairs=[("k8v4", "k4v2")])


def test_right_answers_are_lost_and_nats_are_gained() -> None:
    found = loss([1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0], "needle")
    assert (found.mean, found.full) == (0.25, 0.75)
    assert found.share == pytest.approx(1 / 3)
    assert loss([3.0, 2.0], [2.5, 1.5], "nll") == Loss(0.5, 0.0, 2.0)
    assert loss([0.0], [0.0], "needle").share == 0


def test_noise_of_answers_is_no_more_than_the_full_caches_own() -> None:
    full = [1.0] * 7 + [0.0] * 3
    found = loss([0.0, *full[1:]], full, "multikey")
    assert found.noise == pytest.approx(0.1)  # of the differences: one in ten
    assert found.within(0.0)
    assert not loss([0.0, 0.0, *full[2:]], full, "multikey").within(0.0)
    always = loss([0.0] + [1.0] * 9, [1.0] * 10, "needle")
    assert always.noise == 0
    assert not always.within(0.0)
    assert not always.within(0.05)
    assert always.within(0.1)


def test_noise_of_nats_is_three_errors_of_the_differences() -> None:
    full = [2.0, 3.0, 2.5, 4.0, 1.0]
    scores = [a + b for a, b in zip(full, (0.0, 0.2, 0.1, 0.3, 0.15), strict=True)]
    found = loss(scores, full, "nll")
    assert found.mean == pytest.approx(0.15)
    assert found.noise == pytest.approx(3 * 0.0125**0.5 / 5**0.5)
    assert found.within(0.0)
    assert not loss([a + 0.15 for a in full], full, "nll").within(0.0)  # the same everywhere
    assert loss([a + 0.12 for a in full], full, "nll").within(0.05)


def test_few_samples_have_no_noise() -> None:
    assert loss([2.0, 2.4, 2.6, 2.2], [2.0] * 4, "nll").noise == 0
    assert loss([0.0, 1.0], [1.0, 0.0], "needle").noise == 0


def test_scores_of_other_samples_are_not_compared() -> None:
    for scores, full in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="pass one of each for every sample"):
            loss(scores, full, "nll")


def point(ratio: float, lost: float) -> Point:
    return Point(SETTING, {"needle": Loss(lost, 0.0, 1.0)}, ratio)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-1, 1)), min_size=1, max_size=20))
def test_nothing_beats_a_point_of_the_frontier(pairs: list[tuple[float, float]]) -> None:
    points = [point(*pair) for pair in pairs]
    front = frontier(points)
    assert [p.ratio for p in front] == sorted(p.ratio for p in front)
    for p in points:
        beaten = any(f.ratio <= p.ratio and f.worst <= p.worst for f in front)
        assert beaten
        if p in front:
            assert not any(q.ratio < p.ratio and q.worst < p.worst for q in points)


def test_the_cheapest_that_is_good_enough_is_chosen() -> None:
    points = [point(0.2, 0.3), point(0.25, 0.05), point(0.3, 0.0), point(0.4, -0.1)]
    assert choose(points, 0.0) is points[2]
    assert choose(points, 0.05) is points[1]
    assert choose(points, 0.3) is points[0]
    assert choose(points[:1], 0.05) is None
    mixed = replace(points[1], losses={**points[1].losses, "nll": Loss(1.0, 0.0, 2.0)})
    assert choose([mixed], 0.05) is None


def test_points_are_means_over_the_same_samples(tmp_path: Path) -> None:
    search = Search((SETTING,), ("needle", "nll"), length=100, samples=2)
    journal = Journal.start(tmp_path / "partial", {})

    def finished(policy: str, task: str, where: str, sample: int, score: float, held: int):
        names = {"policy": policy, "task": task, "setting": where, "sample": sample}
        return Finished(**names, score=score, kv_bytes=held, full_bytes=100, seconds=0)

    for i in range(2):
        journal.append([finished("full", "needle", "aware", i, 1.0, 100)])
        journal.append([finished(SETTING.spec, "needle", "aware", i, float(i), 30)])
        journal.append([finished("full", "nll", "agnostic", i, 2.0, 100)])
        journal.append([finished(SETTING.spec, "nll", "agnostic", i, 2.5, 40)])
    (found,) = search.points(journal)
    assert found.losses["needle"].mean == 0.5
    assert found.losses["nll"] == Loss(0.5, 0.0, 2.0)
    assert found.ratio == pytest.approx(0.35)
    assert found.worst == 0.5
    assert search.total == 2 * 2 * 2


def test_a_profile_is_what_leankv_loads(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    chosen = replace(point(0.3, 0.0), setting=replace(SETTING, last=None, window=32))
    write_profile(path, chosen, loaded.name, loaded.fingerprint, 0.05, 100)
    policy = parse(f"leankv:profile={path}")
    for name in Setting.__dataclass_fields__:
        assert getattr(policy, name) == getattr(chosen.setting, name)
    assert policy.fitted_to == loaded.fingerprint
    CompressedCache(loaded.model, policy)
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    other = json.loads(path.read_text()) | {"fingerprint": "another"}
    path.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="calibrated"):
        CompressedCache(loaded.model, f"leankv:profile={path}")


# the command


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["calibrate", "leankv", *map(str, arguments)])


@pytest.fixture
def options(folder: Path, text_file: Path, tmp_path: Path) -> list[object]:
    small = ("--length", 400, "--samples", 2, "--continuation", 4, "--window", 8)
    where = ("--model", folder, "--text", text_file, "--out", tmp_path / "profile.json")
    return [*where, *small, "--t-high", "1%,30%", "--t-low", "0,0.1%"]


def test_it_finds_a_profile_draws_it_and_shows_the_frontier(
    options: list[object], folder: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "frontier.png"
    tasks = ("--task", "nll", "--task", "agreement")
    loose = (*tasks, "--max-loss", "100%", "--pair", "k8v4/k4v2", "--pair", "k8v4/drop")
    result = run(*options, *loose, "--length", 160, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert profile["max_loss"] == 1.0
    assert profile["tasks"] == ["nll", "agreement"]
    assert 0 < profile["bytes_ratio"] < 1
    header, *rows = [line.split() for line in result.stdout.splitlines()[1:]]
    assert header[:2] == ["high", "low"]
    assert any(row[0] == "chosen" for row in rows)
    assert not (tmp_path / "profile.json.partial").exists()
    policy = parse(f"leankv:profile={tmp_path / 'profile.json'}")
    assert policy.window == 8


def test_it_goes_on_where_it_stopped(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = runner._ask

    def counted(loaded, spec, *rest):
        if len(asked) == 2:
            asked.append("stop")
            raise KeyboardInterrupt
        asked.append(spec)
        return ask(loaded, spec, *rest)

    monkeypatch.setattr(runner, "_ask", counted)
    one = ("--pair", "k8v4/k4v2", "--task", "nll", "--max-loss", "1", "--length", 160)
    result = run(*options, *one)
    assert result.exit_code == 130
    assert "4 samples are finished" in " ".join(result.stderr.split())
    result = run(*options, *one)
    assert result.exit_code == 0, result.output
    assert "Resuming from" in result.stderr
    assert len(asked) == 1 + 5  # four settings and full, two samples at once, none of them twice


def test_nothing_good_enough_writes_nothing(options: list[object], tmp_path: Path) -> None:
    result = run(*options, "--task", "nll", "--pair", "k1v1/drop", "--t-high", "90%")
    assert result.exit_code == 1, result.output
    said = " ".join(result.stderr.split())
    assert "No setting loses 0.0% or less on every task" in said
    assert not (tmp_path / "profile.json").exists()
    assert (tmp_path / "profile.json.partial").exists()


def test_a_task_that_the_full_cache_cannot_do_says_nothing(options: list[object]) -> None:
    result = run(*options, "--task", "needle", "--pair", "k8v4/drop", "--t-high", "1%")
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "the full cache answers none of 2 samples of needle right" in said


def test_a_picture_over_the_profile_is_refused(options: list[object], tmp_path: Path) -> None:
    result = run(*options, "--plot", tmp_path / "profile.json")
    assert result.exit_code == 2
    assert "--plot and --out both name" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (("--t-high", "120%"), "--t-high 120% is not a share; use 0 to 1, or 0% to 100%"),
        (("--pair", "k8v4/k4v2", "--t-low", "50%"), "every t_low is above every t_high"),
        (("--max-loss", "much"), "--max-loss much is not a share"),
        (("--pair", "k8v4"), "--pair k8v4 is not a pair of formats"),
        (("--pair", "k8v4/k9v9"), "k9v9"),
        (("--task", "poem"), "poem"),
        (("--plot", "/"), "--plot / is a folder"),
    ],
)
def test_what_it_refuses(options: list[object], extra: tuple[str, ...], sentence: str) -> None:
    result = run(*options, *extra)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert sentence in " ".join(result.stderr.replace("│", " ").split())


def test_importing_the_command_line_does_not_import_altair() -> None:
    code = "import sys, kv_serve.cli, kv_eval.calibrate.plot; print('altair' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_worst_task_counts() -> None:
    found = Point(SETTING, {"needle": Loss(0.0, 0.0, 1.0), "nll": Loss(0.2, 0.0, 2.0)}, 0.3)
    assert math.isclose(found.worst, 0.1)


def test_profile_and_picture_are_written_where_nobody_reads_what_is_printed(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ("--pair", "k8v4/k4v2", "--t-high", "1%", "--task", "nll", "--max-loss", "1")
    picture = tmp_path / "frontier.png"
    assert run_unread(monkeypatch, "calibrate", "leankv", *options, *one, "--plot", picture) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["frontier.png", "profile.json"]
