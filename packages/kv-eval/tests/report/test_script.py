"""The page's script, run by node on as much of a document as it uses."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from page_script import states

DOCUMENT = Path(__file__).parent.parent / "support" / "small_document.js"
ROWS = [["b10", "9"], ["b9", "10"], ["a", ""], ["c", "-1.5"], ["d", "9"]]
MARKS = [["k8v4", 100, 100], ["k4v2", 130, 100], ["full", 380, 20]]


def run(asked: str, *steps: str) -> list[Any]:
    """Take steps one after the other, and give what `asked` says at first and after each."""
    script = files("kv_eval.report").joinpath("page.js").read_text("utf-8")
    document = DOCUMENT.read_text("utf-8").replace("ROWS", json.dumps(ROWS))
    document = document.replace("KINDS", '["text", "number"]').replace("MARKS", json.dumps(MARKS))
    return states(document, script, asked, steps)


def firsts(state: dict[str, Any]) -> list[str]:
    return [row[0] for row in state["rows"]]


def test_a_click_sorts_and_another_one_turns_it_around() -> None:
    before, rising, falling = run("table", "click(1)", "click(1)")
    assert before["buttons"] == ["button button"] * 2  # which a keyboard reaches and presses
    assert (before["heads"], before["rows"]) == (["none", "none"], ROWS)
    assert rising["heads"] == ["none", "ascending"]
    assert firsts(rising) == ["c", "b10", "d", "b9", "a"]  # by number; what is missing is last
    assert falling["heads"] == ["none", "descending"]
    assert firsts(falling) == ["b9", "b10", "d", "c", "a"]  # and still is


def test_text_is_sorted_as_it_is_read() -> None:
    _, rising, other = run("table", "click(0)", "click(1)")
    assert firsts(rising) == ["a", "b9", "b10", "c", "d"]
    assert [rising["heads"], other["heads"]] == [["ascending", "none"], ["none", "ascending"]]


def test_a_pointer_is_told_of_the_nearest_point() -> None:
    found = run(
        "tip",
        'point("pointermove", 112, 100)',
        'point("pointermove", 118, 100)',
        'point("pointermove", 200, 100)',
        'point("pointermove", 100, 90)',
        'point("pointerleave", 0, 0)',
    )
    assert [tip and tip["said"] for tip in found] == [
        None,
        ["k8v4", "1\n2"],
        ["k4v2", "1\n2"],
        None,
        ["k8v4", "1\n2"],
        None,
    ]
    assert [tip["marked"] for tip in found if tip] == [["k8v4"], ["k4v2"], ["k8v4"]]


def test_what_a_tap_shows_stays_until_there_is_another() -> None:
    found = run(
        "tip",
        'point("pointerdown", 100, 100, "touch")',
        'point("pointerleave", 0, 0, "touch")',
        'point("pointerdown", 130, 100, "touch")',
        "elsewhere()",
    )
    assert [tip and tip["said"][0] for tip in found] == [None, "k8v4", "k8v4", "k4v2", None]


def test_a_point_with_the_focus_says_the_same() -> None:
    found = run(
        "tip",
        'mark(0, "focus")',
        'mark(0, "blur")',
        'mark(1, "focus")',
        'key("Escape")',
        'mark(0, "focus")',
        'point("pointerdown", 130, 100)',
        'mark(0, "blur")',
    )
    said = [tip and tip["said"][0] for tip in found]
    assert said == [None, "k8v4", None, "k4v2", None, "k8v4", "k4v2", "k4v2"]


def test_it_is_shown_inside_a_narrow_screen() -> None:
    _, middle, corner = run("tip", 'mark(0, "focus")', 'mark(2, "focus")')
    assert middle["at"] == ["50px", "47px"]  # above its point
    assert corner["at"] == [f"{390 - 100 - 8}px", "33px"]  # below it, where there is room
