"""Texts that tasks are made of: the one that is always there, and files."""

from pathlib import Path

import pytest

from kv_eval.tasks import TaskError, Text, default_text, read_text


def test_default_text_is_long_english_prose() -> None:
    text = default_text()
    assert text == default_text()
    assert len(text.body) > 100_000
    assert len(set(text.paragraphs)) == len(text.paragraphs)
    letters = sum(letter.isalpha() or letter.isspace() for letter in text.body)
    assert letters / len(text.body) > 0.9
    assert not any(line.startswith(("*", " ", "-")) for line in text.paragraphs)
    assert max(len(piece) for piece in text.pieces()) <= 60


def test_file_becomes_paragraphs(tmp_path: Path) -> None:
    file = tmp_path / "some.txt"
    file.write_bytes('\ufeffOne line\r\ngoes on. "Two!" he said.\r\n \r\n\r\nThree?'.encode())
    text = read_text(file)
    assert text.name == "some.txt"
    assert text.paragraphs == ('One line goes on. "Two!" he said.', "Three?")
    pieces = [" ".join(piece) for piece in text.pieces()]
    assert pieces == ["One line goes on.", '"Two!"', "he said.", "Three?"]
    assert read_text(file).digest == text.digest
    assert Text("some.txt", ("other",)).digest != text.digest


def test_bad_text_files(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="No such file"):
        read_text(tmp_path / "missing.txt")
    with pytest.raises(TaskError, match="cannot read"):
        read_text(tmp_path)
    file = tmp_path / "bad.txt"
    file.write_bytes(b"\xff\xfe\x00latin")
    with pytest.raises(TaskError, match="is not UTF-8"):
        read_text(file)
    file.write_text(" \n\n \n")
    with pytest.raises(TaskError, match="has no words"):
        read_text(file)
