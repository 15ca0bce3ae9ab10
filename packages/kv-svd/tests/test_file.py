"""The statistics file: loaded intact, or refused with a sentence."""

import os
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import kv_policy.tensor_files as io_module
import kv_svd.file as file_module
from damaged import mutated
from kv_policy import parse
from kv_svd import load, load_facts, save


def test_what_is_saved_comes_back(made, file: Path) -> None:
    facts, found = load(file)
    assert facts == load_facts(file)
    assert (facts.model, facts.fingerprint, facts.tokens) == ("made up", "0123456789abcdef", 180)
    assert (facts.layers, facts.heads, facts.group, facts.together) == (2, 4, 3, 2)
    assert (facts.key_dim, facts.value_dim, facts.output_rows) == (64, 32, 3 * 384)
    expected = made.calibration(2).statistics()
    assert torch.equal(found.key, expected.key)
    assert torch.equal(found.value, expected.value)
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("query", "key", "value", "output"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert one.rows == other.rows
            assert torch.equal(one.total, other.total)


def test_equal_statistics_give_equal_files_and_replace_old_ones(made, tmp_path: Path) -> None:
    path = tmp_path / "found"
    path.write_text("older")
    first = made.write(path).read_bytes()
    assert made.write(path).read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["found"]


def test_a_write_that_fails_leaves_the_old_file(
    made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made.write(tmp_path / "found")
    before = path.read_bytes()

    def full(fresh: Path, target: Path) -> None:
        raise OSError(28, "no space is left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        made.write(path, rate=0.5)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["found"]


def test_a_file_that_changed_is_read_again(
    made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made.write(tmp_path / "found")
    assert load(path)[1] is load(path)[1]
    assert load_facts(path).rate is None
    with monkeypatch.context() as patched:
        patched.delattr(file_module, "read_facts")
        assert load_facts(path).rate is None
    made.write(path, rate=0.25)
    assert load_facts(path).rate == 0.25
    assert load(path)[0].rate == 0.25


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    for read in (load, load_facts):
        with pytest.raises(FileNotFoundError, match=r"does not exist; write it with `kv-serve cal"):
            read(tmp_path / "none")


@pytest.fixture(scope="module")
def whole(make_model, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    small = make_model(layers=1, heads=1, group=1, dim=2, value_dim=2, tokens=5)
    return small.write(tmp_path_factory.mktemp("small") / "small").read_bytes()


def test_every_flipped_byte_is_noticed(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "found"
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"is damaged|has no 'kv-svd statistics 1'"):
            load(path)
        path.unlink()
    path.write_bytes(whole)
    assert load(path)[0].tokens == 10


def test_the_head_alone_is_checked_too(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "found"
    at = whole.index(b"made up")
    path.write_bytes(whole[:at] + b"fade up" + whole[at + 7 :])
    with pytest.raises(ValueError, match="is damaged: its checksum does not match"):
        load_facts(path)


@pytest.mark.parametrize("length", [0, 5, 200, -1])
def test_a_file_that_was_cut_off_is_damaged(whole: bytes, tmp_path: Path, length: int) -> None:
    path = tmp_path / "found"
    path.write_bytes(whole[:length])
    for read in (load, load_facts):
        with pytest.raises(ValueError, match="is damaged or not a safetensors file"):
            read(path)


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="has no 'kv-svd statistics 1', but something else"):
        load(path)


def test_a_later_version_is_refused_by_name(
    made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "FORMAT", "kv-svd statistics 2")
    path = made.write(tmp_path / "found")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 2 of the format 'kv-svd statistics'"):
        load_facts(path)


def test_facts_of_other_sizes_are_refused(file: Path, made, make_model, tmp_path: Path) -> None:
    facts, _ = load(file)
    for other in (made.calibration(1), make_model(tokens=91).calibration(2)):
        with pytest.raises(ValueError, match="do not match the sizes in the header"):
            save(tmp_path / "found", facts, other.statistics())


@pytest.mark.parametrize(
    "changed",
    [{"group": 2}, {"output_rows": 384}, {"group": 1, "output_rows": 7}, {"together": 3}],
    ids=str,
)
def test_facts_of_other_rows_are_refused(
    file: Path, tmp_path: Path, changed: dict[str, int]
) -> None:
    facts, found = load(file)
    with pytest.raises(ValueError, match="do not match the sizes in the header"):
        save(tmp_path / "found", msgspec.structs.replace(facts, **changed), found)


@pytest.mark.parametrize("name", ["key", "value"])
def test_singular_values_of_other_sizes_are_refused(file: Path, tmp_path: Path, name: str) -> None:
    facts, found = load(file)
    cut = replace(found, **{name: getattr(found, name)[..., 1:]})
    with pytest.raises(ValueError, match="do not match the sizes in the header"):
        save(tmp_path / "found", facts, cut)
    text, tensors = io_module.read(file, file_module.FORMAT, "zack")
    tensors[f"singular.{name}"] = tensors[f"singular.{name}"][..., 1:]
    io_module.write(tmp_path / "made", file_module.FORMAT, text, tensors)
    with pytest.raises(ValueError, match="do not match the sizes in the header"):
        load(tmp_path / "made")


def test_output_rows_of_no_whole_projection_are_refused(file: Path, tmp_path: Path) -> None:
    _, tensors = io_module.read(file, file_module.FORMAT, "zack")
    facts = msgspec.structs.replace(load_facts(file), output_rows=3 * 384 + 1)
    path = tmp_path / "made"
    io_module.write(path, file_module.FORMAT, msgspec.json.encode(facts).decode(), tensors)
    with pytest.raises(ValueError, match="do not match the sizes in the header"):
        load(path)


def test_a_file_of_equal_time_and_size_is_read_again_if_replaced(made, tmp_path: Path) -> None:
    path, other = made.write(tmp_path / "found", rate=0.25), tmp_path / "other"
    made.write(other, rate=0.35)
    time = path.stat().st_mtime_ns
    os.utime(other, ns=(time, time))
    assert load_facts(path).rate == load(path)[0].rate == 0.25
    assert other.stat().st_size == path.stat().st_size
    other.replace(path)
    assert path.stat().st_mtime_ns == time
    assert load_facts(path).rate == load(path)[0].rate == 0.35


def test_no_change_of_the_bytes_is_taken_for_statistics(make_model, tmp_path: Path) -> None:
    path = tmp_path / "x"
    make_model(layers=1, heads=2, group=1, dim=4, value_dim=4, tokens=9).write(path)
    whole, chance = path.read_bytes(), random.Random(0)
    facts, tensors = io_module.read(path, file_module.FORMAT, "zack")
    for _ in range(400):
        path.write_bytes(mutated(whole, chance))
        with suppress(ValueError):
            text, found = io_module.read(path, file_module.FORMAT, "zack")
            assert text == facts
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], tensors[name]) for name in tensors)


FLAWS = {
    "missing": lambda x: None,
    "of no dimension": lambda x: x.sum(),
    "of fewer layers": lambda x: x[:0],
    "in float32": lambda x: x.float(),
    "not finite": lambda x: x / 0,
}


@pytest.mark.parametrize("flaw", FLAWS)
@pytest.mark.parametrize("name", ["query", "output", "singular.value"])
def test_tensors_that_a_stranger_sealed_are_checked(
    file: Path, tmp_path: Path, name: str, flaw: str
) -> None:
    facts, tensors = io_module.read(file, file_module.FORMAT, "zack")
    changed = tensors | {name: FLAWS[flaw](tensors[name])}
    path = tmp_path / "x"
    kept = {each: tensor for each, tensor in changed.items() if tensor is not None}
    io_module.write(path, file_module.FORMAT, facts, kept)
    with pytest.raises(ValueError, match=f"{name} (should be float64|contains an infinity)"):
        load(path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x" * 5000, "cannot be read: File name too long"),
        ("no\0name", "cannot be read: embedded null byte"),
        ("", "is a directory; name a file in it"),
        (
            "x.partial",
            "unfinished calibration; run its command again, such as `kv-serve calibrate zack",
        ),
    ],
)
def test_a_name_of_no_file_is_a_sentence(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        parse(f"zack:file={tmp_path}/{name},rate=0.3")
    assert len(str(raised.value)) < 500
