"""What a search tries is what the installed packages offer."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from kv_eval.recommend.grid import SHARES, grid
from kv_policy import Part, Registry, parse
from kv_transformers.from_text import read_spec

FOUND = grid()


def test_every_text_is_canonical_and_named_once() -> None:
    assert len({*FOUND}) == len(FOUND)
    assert [read_spec(spec) for spec in FOUND] == [*FOUND]


@pytest.mark.parametrize(
    "spec",
    [
        "k8v4",
        "k4v4:keys=channel",
        "k4v2:window=64",
        "hadamard+k4v4",
        "leankv",
        "kv-compress:rate=4+k8v4",
        "snapkv:budget=12.5%+k4v4:window=64",
        "streaming:budget=50%+k8v8",
    ],
)
def test_formats_selectors_and_rotations_are_tried(spec: str) -> None:
    assert str(parse(spec)) in FOUND


def test_what_needs_a_file_or_saves_nothing_is_left_out() -> None:
    names = {part.partition(":")[0] for spec in FOUND for part in spec.split("+")}
    assert not names & {"zack", "gate", "raw", "bf16", "k1v1"}


def test_shares_are_those_that_are_given() -> None:
    some = [spec for spec in grid(["30%"]) if spec.startswith("snapkv")]
    assert some
    assert all("budget=30%" in spec for spec in some)
    each = [spec for spec in FOUND if spec.startswith("snapkv")]
    assert len(each) == len(SHARES) * len(some)


@dataclass(frozen=True)
class Unsearched(Part):
    """A part that no search tries."""

    name: ClassVar[str] = "unsearched"
    variants: ClassVar[tuple[str, ...]] = ()


def test_a_part_says_what_is_varied(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Registry.scan()
    only = Registry({"snapkv": found.claims["snapkv"], "k8v4": found.claims["k8v4"]})
    assert grid(["50%"], only) == ("k8v4", "snapkv:budget=50%+k8v4")
    snapkv = only.load("snapkv")
    monkeypatch.setattr(snapkv, "variants", ("window=8", "nonsense=1"))
    assert grid(["50%"], only) == ("k8v4", "snapkv:budget=50%,window=8+k8v4")
    monkeypatch.setattr(snapkv, "variants", Unsearched.variants)
    assert grid(["50%"], only) == ("k8v4",)
