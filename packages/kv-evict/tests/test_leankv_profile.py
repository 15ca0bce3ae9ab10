"""Profiles of leankv that were edited or damaged: loaded, or refused with a sentence."""

import random
from pathlib import Path

import pytest

from damaged import mutated
from kv_evict.leankv_profile import Profile, load_profile

PROFILE = Profile(
    model="tiny",
    fingerprint="0123456789abcdef",
    high="k8v4",
    low="k4v2",
    t_high=0.01,
    t_low=0.001,
    max_loss=0.1,
    tasks=("nll",),
    length=100,
    bytes_ratio=0.5,
)


def said(path: Path) -> str:
    """Return the error for a file; empty if it is loaded."""
    try:
        load_profile(path)
    except ValueError as error:
        return str(error)
    return ""


def test_no_bytes_of_a_profile_end_in_anything_but_a_sentence(tmp_path: Path) -> None:
    path, chance = tmp_path / "profile.json", random.Random(0)
    PROFILE.save(path)
    whole = path.read_bytes()
    deep = b'{"model":' * 100_000
    for data in (b"", b'{"model": "\xff"}', deep, *(mutated(whole, chance) for _ in range(300))):
        path.write_bytes(data)
        found = said(path)
        assert not found or found.startswith(f"{path} is not a leankv profile: ")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x" * 5000, "cannot be read: File name too long"),
        ("no\0name", "cannot be read: embedded null byte"),
        (".", "is a directory; name a file in it"),
        ("x.json.partial", "run the same `kv-serve calibrate leankv` again, which resumes from"),
    ],
)
def test_a_name_of_no_profile_is_a_sentence(tmp_path: Path, name: str, says: str) -> None:
    assert says in said(tmp_path / name)
