"""The page's script, run by node on as much of a document as it uses."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from inspected import HELD, inspection
from kv_eval.inspection.page import page
from page_script import states
from result_files import tree

DOCUMENT = Path(__file__).parent.parent / "support" / "inspected_document.js"
ALL = ["t s8", "t s5", "t s5", "t s8 n", "t s8 silent", "t s10"]


def run(*steps: str) -> list[dict[str, Any]]:
    """Take steps one after the other on the page of a prompt, and give the state after each."""
    html = tree(page(inspection()))
    tokens = [[t["class"], t["title"]] for t in html.one("div", id="prompt").all("span")]
    cells = [[c["data-layer"], c["data-head"], c["data-held"]] for c in html.one("ol").all("li")]
    places = [name.text for name in html.all("span", class_="place")]
    document = DOCUMENT.read_text("utf-8")
    for name, value in (("TOKENS", tokens), ("CELLS", cells), ("PLACES", places)):
        document = document.replace(f"{name}.map", f"{json.dumps(value)}.map")
    script = html.one("script").text
    assert script.endswith(files("kv_eval.inspection").joinpath("page.js").read_text("utf-8"))
    return states(document, script, "state", steps)


def test_at_first_all_is_shown_as_it_is_without_a_script() -> None:
    (first,) = run()
    numbers = ["all", "0", "1"]
    places = ["held as", "", ["any", "k8v4", "raw window"]]
    assert first["choices"] == [["layer", "", numbers], ["head", "", numbers], places]
    assert first["looks"] == ALL
    assert first["facts"][4] == "raw window 75.0%, not kept 25.0%"
    assert first["titles"] == [""] * 6  # the browser would show them as well
    assert first["said"] == "4.3 of 6 tokens kept, on average"
    assert first["hidden"] == [True, False]
    assert first["chosen"] == [False] * 4


def test_one_head_of_one_layer_shows_where_its_tokens_are() -> None:
    _, one, all_again = run('choose("0", "1")', 'choose("", "")')
    assert HELD[0][1] == "0.0011"
    assert one["looks"] == [
        *("t at k0", "t s0", "t at k0", "t at k0 n", "t at k1 silent", "t at k1")
    ]
    assert one["facts"] == ["k8v4", "not kept", "k8v4", "k8v4", "raw window", "raw window"]
    assert one["said"] == "5 of 6 tokens kept"
    assert one["hidden"] == [False, True]
    assert one["chosen"] == [False, True, False, False]
    assert all_again["looks"] == ALL
    assert all_again["hidden"] == [True, False]
    assert all_again["facts"][0] == "k8v4 75.0%, not kept 25.0%"


def test_a_layer_or_a_head_alone_is_an_average() -> None:
    _, layer, head = run('choose("1", "")', 'choose("", "0")')
    assert HELD[1] == ("000011", "...0.1")
    assert layer["looks"] == ["t s5", "t s5", "t s5", "t s10 n", "t s5 silent", "t s10"]
    assert layer["facts"][4] == "raw window 50.0%, not kept 50.0%"
    assert layer["said"] == "4 of 6 tokens kept, on average"
    assert layer["chosen"] == [False, False, True, True]
    assert [HELD[0][0], HELD[1][0]] == ["00..11", "000011"]
    assert head["looks"] == ["t s10", "t s10", "t s5", "t s5 n", "t s10 silent", "t s10"]
    assert head["chosen"] == [True, False, True, False]


def test_a_place_alone_shows_how_many_hold_a_token_there() -> None:
    _, mean, one, none = run('choose("", "", "1")', 'choose("0", "1", "1")', 'choose("", "", "")')
    assert mean["looks"] == ["t s0", "t s0", "t s0", "t s0 n", "t s8 silent", "t s10"]
    assert mean["facts"][0] == "k8v4 75.0%, not kept 25.0%"
    assert mean["said"] == "1.8 of 6 tokens held as raw window, on average"
    assert mean["chosen"] == [False] * 4
    assert one["looks"] == ["t s0", "t s0", "t s0", "t s0 n", "t at k1 silent", "t at k1"]
    assert one["facts"][0] == "k8v4"
    assert one["said"] == "2 of 6 tokens held as raw window"
    assert none["looks"] == ALL


def test_a_click_on_the_map_chooses_and_another_one_takes_it_back() -> None:
    _, one, none = run("cell(3)", "cell(3)")
    assert [value for _, value, _ in one["choices"]] == ["1", "1", ""]
    assert one["said"] == "2 of 6 tokens kept"
    assert [value for _, value, _ in none["choices"]] == ["", "", ""]
    assert none["looks"] == ALL


def test_a_token_that_is_pointed_at_says_where_it_is() -> None:
    _, told, chosen, again = run("point(4)", 'choose("0", "0")', "point(4)")
    assert told["tip"] == ["token 4", "raw window 75.0%, not kept 25.0%"]
    assert chosen["tip"] is None
    assert again["tip"] == ["token 4", "raw window"]
