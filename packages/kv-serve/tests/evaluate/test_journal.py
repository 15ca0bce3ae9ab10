"""Finished samples on disk: what is there after an interruption, and when it may be used."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_serve.evaluate.journal import ChangedSettingsError, Finished, Journal, open_journal

ASKED = {"model": "tiny", "length": 100, "versions": {"torch": "1"}}


def entry(sample: int, score: float = 0.5) -> Finished:
    return Finished(
        policy="snapkv:budget=8+k8v4",
        task="needle",
        setting="aware",
        sample=sample,
        score=score,
        kv_bytes=10,
        full_bytes=40,
        seconds=0.25,
        tokens=(1, 2, 3),
    )


def test_what_was_appended_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "out.json.partial"
    journal, sentence = open_journal(path, ASKED)
    assert sentence == ""
    journal.append([entry(0), entry(1)])
    journal.append([entry(2, 1 / 3)])
    again, sentence = open_journal(path, ASKED)
    assert sentence == f"Going on from {path}, where 3 samples are finished."
    assert again.get("snapkv:budget=8+k8v4", "needle", "aware", 2) == entry(2, 1 / 3)
    assert again.get("snapkv:budget=8+k8v4", "needle", "aware", 3) is None
    assert len(again) == 3


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_wherever_the_file_was_cut_off_whole_samples_survive(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "cut.partial"
    journal = Journal.start(path, ASKED)
    header = path.stat().st_size
    for i in range(4):
        journal.append([entry(i)])
    whole = path.read_bytes()
    size = data.draw(st.integers(header, len(whole)))
    path.write_bytes(whole[:size])
    resumed = Journal.resume(path, ASKED)
    survived = whole[:size].count(b"\n") - 1
    assert len(resumed) == survived
    resumed.append([entry(i) for i in range(survived, 4)])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (ASKED | {"length": 200}, "length was 100 and is 200"),
        (ASKED | {"seed": 1}, "seed was None and is 1"),
        (ASKED | {"versions": {"torch": "2"}}, "versions was {'torch': '1'} and is {'torch': '2'}"),
        ({"model": "tiny", "length": 100}, "versions was {'torch': '1'} and is None"),
    ],
)
def test_samples_of_other_settings_are_never_used(
    tmp_path: Path, asked: dict[str, object], says: str
) -> None:
    path = tmp_path / "out.partial"
    Journal.start(path, ASKED).append([entry(0)])
    with pytest.raises(ChangedSettingsError) as refused:
        Journal.resume(path, asked)
    assert says in str(refused.value)
    journal, sentence = open_journal(path, asked)
    assert says in sentence
    assert sentence.endswith("Starting anew.")
    assert len(journal) == 0
    assert len(Journal.resume(path, asked)) == 0


@pytest.mark.parametrize("content", [b"", b"\n", b"{}", b"not json\n", b'{"model":1}\n{"x":2}\n'])
def test_a_file_that_is_something_else_is_started_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.partial"
    path.write_bytes(content)
    journal, sentence = open_journal(path, ASKED)
    assert sentence.endswith("Starting anew.")
    assert len(journal) == 0
    assert json.loads(path.read_text()) == ASKED
