"""`kv-serve calibrate zack`: what it reads, what it writes, how it goes on, what it refuses."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kv_eval.calibrate.collect as collect
from calibrating import calibrated, said
from kv_eval.calibrate.collect import Reading
from kv_eval.calibrate.partial import Partial
from kv_eval.calibrate.rate import Rate, RateSearch
from kv_eval.calibrate.search import Search
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.records import Records
from kv_eval.tasks import Text
from kv_policy import load_calibrator, parse
from kv_svd import load, load_facts, save
from kv_transformers import CompressedCache, cache_shape
from kv_transformers.collecting import output_projections
from kv_transformers.fitted import WrongModelError
from kv_transformers.from_text import FULL
from kv_transformers.models import LoadedModel

run = partial(calibrated, "zack")


@pytest.fixture(scope="module")
def long_file(text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of more than 4096 characters, which are the tokens of the tiny model."""
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text(text.body[:4200])
    return path


@pytest.fixture
def options(folder: Path, long_file: Path, tmp_path: Path) -> list[object]:
    where = ("--model", folder, "--text", long_file, "--out", tmp_path / "found")
    return [*where, "--tokens", 4096, "--window", 512]


def test_it_writes_what_the_policies_read(
    options: list[object], loaded: LoadedModel, tmp_path: Path
) -> None:
    result = run(*options, "--together", 2)
    assert result.exit_code == 0, result.output
    facts, found = load(tmp_path / "found")
    assert (facts.fingerprint, facts.tokens, facts.together) == (loaded.fingerprint, 4096, 2)
    assert (facts.text, facts.layers, facts.rate) == ("long.txt", 2, None)
    assert found.key.shape == (2, 2, 8)
    assert [p.name for p in tmp_path.iterdir()] == ["found"]
    assert "median dimensions without 5% of the singular values" in result.stdout
    assert "4,096" in result.stdout
    assert "4,096 tokens are few; beyond about 16,384" in said(result)
    shape = cache_shape(loaded.model)
    for spec in ("zack", "svd-kv", "kq-svd", "palu:together=2"):
        name, _, more = spec.partition(":")
        policy = parse(f"{name}:file={tmp_path / 'found'},rate=0.25,multiple=1,{more}".rstrip(","))
        assert policy.fitted_to == loaded.fingerprint
        assert policy.basis.bind(1, shape).key is not None


def test_the_summary_as_json(options: list[object], tmp_path: Path) -> None:
    result = run(*options, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tokens"] == 4096
    assert found["bytes"] == (tmp_path / "found").stat().st_size
    assert found["seconds"] > 0
    assert set(found["median_dimensions"]) == {"0.01", "0.05", "0.1"}
    assert 1 <= found["median_dimensions"]["0.1"]["Q-K"] <= 8
    assert found["rate"] is None


def test_going_on_gives_the_same_file_bit_for_bit(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*options).exit_code == 0
    whole = (tmp_path / "found").read_bytes()
    (tmp_path / "found").unlink()
    save, count = Partial.save, []

    def interrupted(self: Partial, calibrator: object) -> None:
        save(self, calibrator)
        count.append(self.windows)
        if len(count) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Partial, "save", interrupted)
    result = run(*options)
    assert result.exit_code == 130
    assert "Interrupted. The state after whole windows is saved in" in said(result)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["found.partial"]
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert "after 2,048 tokens" in said(result)
    assert count == [2, 4, 6, 8]
    assert (tmp_path / "found").read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["found"]


def test_an_interruption_in_the_middle_of_a_window_counts_only_whole_ones(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_svd import Calibration

    see, seen = Calibration.see, []

    def once(self: Calibration, layer: int, *rest: object) -> None:
        seen.append(layer)
        if len(seen) == 2 * 5 + 2:  # the sixth window's second layer
            raise KeyboardInterrupt
        see(self, layer, *rest)

    monkeypatch.setattr(Calibration, "see", once)
    assert run(*options).exit_code == 130
    result = run(*options)
    assert result.exit_code == 0
    assert "after 2,048 tokens" in said(result)
    assert load_facts(tmp_path / "found").tokens == 4096


def test_other_settings_start_anew(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Partial, calibrator: object) -> None:
        save(self, calibrator)
        raise KeyboardInterrupt

    save = Partial.save
    with monkeypatch.context() as patched:
        patched.setattr(Partial, "save", stop)
        assert run(*options).exit_code == 130
    result = run(*options, "--together", 2)
    assert result.exit_code == 0
    assert "its settings differ: together was 1 and is 2. It is renamed to" in said(result)
    for broken in (b"", b"nonsense" * 10):
        (tmp_path / "found.partial").write_bytes(broken)
        result = run(*options)
        assert result.exit_code == 0
        assert "Starting over." in said(result)
        assert load_facts(tmp_path / "found").together == 1


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (("--tokens", 4095), "4,095 tokens are too few"),
        (("--tokens", 4201), "long.txt has 4,200 tokens and 4,201 were requested"),
        (("--window", 1), "a window of 1 tokens was given"),
        (("--window", 1025), "a window of 1,025 tokens was given; "),
        (("--together", 0), "0 heads together were requested"),
        (("--together", 3), "2 KV heads cannot be grouped by 3"),
        (("--max-loss", "much"), "--max-loss much is not a share"),
        (("--task", "nll"), "--task was given without --max-loss"),
        (("--length", "200", "--seed", "1"), "--length, --seed was given without --max-loss"),
        (("--out", "/"), "--out / is a folder"),
        (("--text", "nowhere"), "cannot read the text nowhere"),
    ],
)
def test_what_it_refuses(
    options: list[object], extra: tuple[object, ...], sentence: str, tmp_path: Path
) -> None:
    result = run(*options, *extra)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert sentence in said(result)
    assert not list(tmp_path.iterdir())


def test_windows_begin_as_the_tokenizer_begins_a_text(
    loaded: LoadedModel, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Reading(tokens=5000, window=1000).windows(loaded, text)
    assert [w.shape for w in plain] == [(1, 1000)] * 5
    ids = loaded.tokenizer.encode(text.body, add_special_tokens=False)
    assert torch.cat(plain, 1)[0].tolist() == ids[:5000]
    monkeypatch.setattr(collect, "text_start", lambda tokenizer: [2])
    begun = Reading(tokens=4500, window=1000).windows(loaded, text)
    assert [w.shape[1] for w in begun] == [1000] * 4 + [500]
    assert all(w[0, 0] == 2 for w in begun)
    assert torch.cat([w[0, 1:] for w in begun]).tolist() == ids[:4495]
    assert Reading(tokens=4096).window_of(loaded) == 1024  # all that this model reads


def test_no_logits_are_computed_and_nothing_grows(loaded: LoadedModel, text: Text, tmp_path: Path):
    shape = cache_shape(loaded.model)
    weights = output_projections(loaded.model, shape)
    calibrator = load_calibrator("zack")(shape, weights)
    heads: list[object] = []
    hook = loaded.model.lm_head.register_forward_hook(lambda *_: heads.append(1))
    windows = Reading(tokens=4096, window=512).windows(loaded, text)
    counts = collect.collect(
        loaded, calibrator, windows, Partial(tmp_path / "partial", {}), every=2
    )
    sizes = {name: t.shape for name, t in calibrator.state().items()}
    assert list(counts) == [512 * i for i in range(1, 9)]
    hook.remove()
    assert heads == []
    assert {name: t.shape for name, t in calibrator.state().items()} == sizes


# the search


class Faked:
    """Scores that fall as the rate grows, in place of a model."""

    def __init__(self, cliff: float) -> None:
        self.cliff = cliff
        self.tried: list[float] = []

    def run(self, loaded: object, plan, text: object, journal: Journal, make: object, *_: object):
        for spec in plan.policies:
            found = 0.0 if spec == FULL else float(spec.rsplit("rate=", 1)[1].split(",")[0])
            for task, where in plan.pairs:
                for i in range(plan.samples):
                    had = journal.get(spec, task, where, i)
                    if had is None:
                        if i == 0 and spec != FULL:
                            self.tried.append(found)
                        had = self._finished(spec, task, where, i, found)
                        journal.append([had])
                    yield had

    def _finished(self, spec: str, task: str, where: str, i: int, found: float) -> Finished:
        lost = 0.0 if found <= self.cliff else 1.0 + found
        score = 2.0 + lost if task == "nll" else 1.0 - lost
        names = {"policy": spec, "task": task, "setting": where, "sample": i}
        return Finished(**names, score=score, kv_bytes=100, full_bytes=100, seconds=0)


SAMPLES: Search[Rate] = Search((), ("nll",), length=100, samples=2)


@pytest.fixture(scope="module")
def calibrated(loaded: LoadedModel, text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with, a+comma")
    path, body = folder / "found", folder / "text"
    body.write_text(text.body)
    small = ("--tokens", 4096, "--window", 1024, "--text", body)
    assert run("--model", loaded.name, "--out", path, *small).exit_code == 0
    return path


@given(st.integers(1, 63), st.floats(0, 1), st.randoms())
def test_halving_finds_the_greatest_rate(
    loaded: LoadedModel, text: Text, count: int, cliff: float, random
) -> None:
    levels = tuple(sorted({round(random.uniform(0.001, 0.99), 4) for _ in range(count)}))
    fake = Faked(cliff)
    search = RateSearch("zack", Path("found"), levels, SAMPLES, 0.0005)

    def trial(self: Search[Rate], *rest: object) -> Iterator[Finished]:
        fake.tried.append(self.settings[0].rate)
        return iter(())

    def points(self: Search[Rate], journal: object):
        from kv_eval.calibrate.loss import Loss
        from kv_eval.calibrate.search import Point

        (setting,) = self.settings
        lost = 0.0 if setting.rate <= cliff else setting.rate
        return (Point(setting, {"nll": Loss(lost, 0.0, 1.0)}, 1.0),)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Search, "run", trial)
        patched.setattr(Search, "points", points)
        list(search.run(loaded, text, Journal(Records(Path("none"), {}))))
    below = [level for level in levels if level <= cliff]
    assert (search.found is None) == (not below)
    if search.found is not None:
        assert search.found.setting.rate == below[-1]
    assert len(fake.tried) <= len(levels).bit_length() <= 6


def test_a_rate_is_a_policy_in_any_folder(calibrated: Path) -> None:
    spec = Rate("zack", calibrated, 0.0).spec
    policy = parse(spec)
    assert str(policy) == spec
    assert (policy.file, policy.rate) == (str(calibrated), 0.0)


def test_statistics_of_another_model_are_refused(
    loaded: LoadedModel, calibrated: Path, tmp_path: Path
) -> None:
    facts, found = load(calibrated)
    other = tmp_path / "other"
    save(other, msgspec.structs.replace(facts, fingerprint="0123456789abcdef"), found)
    with pytest.raises(WrongModelError, match="calibrated with the model 0123456789abcdef, but"):
        CompressedCache(loaded.model, f"zack:file={other},rate=0")


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Faked:
    fake = Faked(0.3)
    monkeypatch.setattr("kv_eval.calibrate.search.run", fake.run)
    monkeypatch.setattr("kv_svd.calibration.MULTIPLE", 1)  # heads of 8 dimensions give up no 16
    return fake


def test_the_found_rate_is_written_into_the_file(
    options: list[object], tmp_path: Path, faked: Faked
) -> None:
    search = ("--max-loss", "1%", "--task", "nll", "--samples", 2, "--length", 100)
    result = run(*options, *search, "--json")
    assert result.exit_code == 0, result.output
    facts = load_facts(tmp_path / "found")
    assert (
        facts.rate == json.loads(result.stdout)["rate"] == max(r for r in faked.tried if r <= 0.3)
    )
    assert (facts.max_loss, facts.tasks) == (0.01, ("nll",))
    assert len(faked.tried) <= 6
    assert [p.name for p in tmp_path.iterdir()] == ["found"]


def test_no_rate_that_is_good_enough(options: list[object], tmp_path: Path, faked: Faked) -> None:
    faked.cliff = 0.0
    search = ("--max-loss", "1%", "--task", "nll", "--samples", 2, "--length", 100)
    result = run(*options, *search)
    assert result.exit_code == 1
    assert "No rate loses 1.0% or less on every task; the lowest loss tried is" in said(result)
    assert load_facts(tmp_path / "found").rate is None


def test_heads_too_small_for_any_rate(
    options: list[object], tmp_path: Path, faked: Faked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_svd.calibration.MULTIPLE", 16)
    search = ("--max-loss", "1%", "--task", "nll", "--samples", 2, "--length", 100)
    result = run(*options, *search)
    assert result.exit_code == 1
    assert "No rate can be tried: heads as small as this model's" in said(result)
    assert "No rate loses" not in said(result)
    assert faked.tried == []
    assert load_facts(tmp_path / "found").rate is None
    assert [p.name for p in tmp_path.iterdir()] == ["found"]


def test_an_interrupted_search_goes_on(
    options: list[object], tmp_path: Path, faked: Faked, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = ("--max-loss", "1%", "--task", "nll", "--samples", 2, "--length", 100)
    finished, stop = faked._finished, [3]

    def interrupted(spec: str, *rest: object) -> Finished:
        stop[0] -= spec != FULL
        if stop[0] < 0:
            stop[0] = 1000
            raise KeyboardInterrupt
        return finished(spec, *rest)

    monkeypatch.setattr(faked, "_finished", interrupted)
    result = run(*options, *search)
    assert result.exit_code == 130
    assert "is written, without a rate. 5 samples are saved in" in said(result)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["found", "found.partial", "found.samples.partial"]
    result = run(*options, *search)
    assert result.exit_code == 0, result.output
    assert "after 4,096 tokens" in said(result)
    assert "where 5 samples are finished" in said(result)
    assert load_facts(tmp_path / "found").rate is not None
    assert [p.name for p in tmp_path.iterdir()] == ["found"]


def test_a_task_that_the_full_cache_cannot_do_says_nothing(
    options: list[object], tmp_path: Path, faked: Faked, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = faked._finished
    monkeypatch.setattr(
        faked, "_finished", lambda *rest: msgspec.structs.replace(finished(*rest), score=0.0)
    )
    small = ("--samples", 2, "--length", 100)
    result = run(*options, "--max-loss", "1%", "--task", "needle", *small)
    assert result.exit_code == 2
    assert "the full cache answers none of 2 samples of needle right" in said(result)
    assert load_facts(tmp_path / "found").rate is None


def test_points_hold_what_was_tried() -> None:
    search = RateSearch("zack", Path("found"), (0.1, 0.2), SAMPLES, 0.0)
    assert search.total == 2 * 1 * 2
    assert search.found is None
    assert replace(search, levels=()).total == 0
