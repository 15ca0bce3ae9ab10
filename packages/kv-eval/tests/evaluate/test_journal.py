"""Finished samples on disk: what is there after an interruption, and when it may be used."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from damaged import mutated
from kv_eval.evaluate.journal import Finished, Journal, open_journal
from kv_eval.evaluate.records import MAGIC, Records, RecordsError

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
    assert sentence == f"Resuming from {path}, where 3 samples are finished."
    assert again.get("snapkv:budget=8+k8v4", "needle", "aware", 2) == entry(2, 1 / 3)
    assert again.get("snapkv:budget=8+k8v4", "needle", "aware", 3) is None
    assert len(again) == 3


def test_no_change_of_the_file_is_taken_for_a_sample(tmp_path: Path) -> None:
    entries = [entry(i, i / 7) for i in range(5)]
    path = tmp_path / "a"
    Journal.start(path, ASKED).append(entries)
    whole, chance = path.read_bytes(), random.Random(0)
    lines = {e.key: whole.split(b"\n")[1 + i] for i, e in enumerate(entries)}
    for _ in range(3000):
        data = mutated(whole, chance)
        records = Records(path, ASKED)
        wrong = records.take(data)
        journal = Journal(records)
        held = [e for e in entries if journal.get(*e.key) is not None]
        assert [journal.get(*e.key) for e in held] == held
        assert len(journal) == len(held)
        there = {*data.split(b"\n")}
        assert wrong or there <= {*whole.split(b"\n")}
        assert {lines[e.key] for e in held} == there & {*lines.values()}  # all that are undamaged


def test_a_damaged_file_is_set_aside_and_its_other_samples_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.json.partial"
    Journal.start(path, ASKED).append([entry(i) for i in range(4)])
    (tmp_path / "out.json.partial.aside").write_text("mine")
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b"0.5", b"0.9")
    damaged = b"\n".join(lines)
    path.write_bytes(damaged)
    journal, sentence = open_journal(path, ASKED)
    aside = tmp_path / "out.json.partial.aside-2"
    assert sentence == (
        f"{path} has 1 damaged line. It is renamed to {aside}. 3 samples are finished and kept."
    )
    assert (aside.read_bytes(), aside.with_name(aside.name[:-2]).read_text()) == (damaged, "mine")
    assert [e.sample for e in journal.of(entry(0).policy, "needle")] == [0, 2, 3]
    journal.append([entry(1)])
    assert open_journal(path, ASKED)[1] == f"Resuming from {path}, where 4 samples are finished."


def test_samples_are_kept_where_the_first_line_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x"
    Journal.start(path, ASKED).append([entry(0), entry(1)])
    path.write_bytes(path.read_bytes().replace(b"tiny", b"tidy"))
    journal, sentence = open_journal(path, ASKED)
    assert len(journal) == 2
    assert "1 damaged line" in sentence


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(data=st.data())
def test_wherever_the_file_was_cut_off_whole_samples_survive(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "cut.partial"
    path.unlink(missing_ok=True)
    journal = Journal.start(path, ASKED)
    header = path.stat().st_size
    for i in range(4):
        journal.append([entry(i)])
    whole = path.read_bytes()
    size = data.draw(st.integers(header, len(whole)))
    path.write_bytes(whole[:size])
    resumed, _ = Journal.resume(path, ASKED)
    survived = whole[: size + 1].count(b"\n") - 1  # a line that lacks its end alone is whole
    assert len(resumed) == survived
    resumed.append([entry(i) for i in range(survived, 4)])
    assert path.read_bytes() == whole


def test_a_disk_that_takes_few_bytes_at_a_time_gets_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    journal = Journal.start(path, ASKED)
    write = os.write
    monkeypatch.setattr("os.write", lambda file, data: write(file, data[:7]))
    journal.append([entry(0), entry(1)])
    assert open_journal(path, ASKED)[1] == f"Resuming from {path}, where 2 samples are finished."


def test_a_line_that_a_full_disk_cut_off_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    journal = Journal.start(path, ASKED)
    journal.append([entry(0)])
    write, left = os.write, [30]

    def filling(file: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        took = write(file, data[: left[0]])
        left[0] = 0
        return took

    with monkeypatch.context() as patched:
        patched.setattr("os.write", filling)
        with pytest.raises(RecordsError) as error:
            journal.append([entry(1)])
    assert str(error.value) == (
        f"the samples in {path} cannot be written: No space left on device; 1 sample is saved "
        "there, and the same command resumes from it"
    )
    assert len(journal) == 1
    journal.append([entry(2)])
    resumed, sentence = open_journal(path, ASKED)
    assert [e.sample for e in resumed.of(entry(0).policy, "")] == [0, 2]
    assert "1 damaged line" in sentence


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (ASKED | {"length": 200}, "length was 100 and is 200"),
        (ASKED | {"seed": 1}, "seed was None and is 1"),
        (ASKED | {"versions": {"torch": "2"}}, "versions was {'torch': '1'} and is {'torch': '2'}"),
        ({"model": "tiny", "length": 100}, "versions was {'torch': '1'} and is None"),
    ],
)
def test_samples_of_other_settings_are_set_aside(
    tmp_path: Path, asked: dict[str, object], says: str
) -> None:
    path = tmp_path / "out.partial"
    Journal.start(path, ASKED).append([entry(0)])
    before = path.read_bytes()
    journal, sentence = open_journal(path, asked)
    assert says in sentence
    assert sentence.endswith(f"It is renamed to {path}.aside. Starting over.")
    assert len(journal) == 0
    assert (tmp_path / "out.partial.aside").read_bytes() == before
    with path.open("ab") as file:  # a line of other settings is none of these
        file.write(before.split(b"\n")[1] + b"\n")
    assert len(open_journal(path, asked)[0]) == 0


def test_the_order_of_settings_means_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    Journal.start(path, ASKED).append([entry(0)])
    assert len(open_journal(path, dict(reversed(ASKED.items())))[0]) == 1


OLD = b'{"model":"tiny"}\n{"policy":"k8v4"}\n'
DEEP = MAGIC + b"[" * 100_000 + b"\n"


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{}", b"not json\n", OLD, b"\xff\xfe{\x00", DEEP, MAGIC]
)
def test_a_file_that_is_something_else_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.partial"
    path.write_bytes(content)
    journal, sentence = open_journal(path, ASKED)
    assert sentence.endswith(f"It is renamed to {path}.aside. Starting over.")
    assert ("from an earlier version" in sentence) == content.startswith(b"{")
    assert len(journal) == 0
    assert (tmp_path / "out.partial.aside").read_bytes() == content
    assert open_journal(path, ASKED)[1] == f"Resuming from {path}, where 0 samples are finished."


def test_a_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.mkdir()
    with pytest.raises(RecordsError, match=r"x cannot be read: Is a directory; move it away"):
        open_journal(path, ASKED)
    (tmp_path / "file").touch()
    with pytest.raises(RecordsError, match=r"cannot be written: "):
        open_journal(tmp_path / "file" / "x", ASKED)
