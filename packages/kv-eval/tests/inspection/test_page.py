"""The page: the prompt as it is, shaded; whole without a script, and of nothing but itself."""

import base64
import hashlib
import re

import pytest

from inspected import HELD, TEXTS, inspection
from kv_eval.inspection.page import page
from kv_eval.inspection.record import LEVELS, level
from result_files import Node, facts, tree


@pytest.fixture
def one() -> Node:
    return tree(page(inspection()))


def tokens(html: Node) -> list[Node]:
    return list(html.one("div", id="prompt").all("span"))


def body(table: Node) -> list[list[str]]:
    rows = table.one("tbody").all("tr")
    return [[cell.text for cell in row.all("td")] for row in rows]


def test_the_page_is_structured(one: Node) -> None:
    assert one.one("head").one("title").text == "What was kept of a prompt: k8v4:window=2 on tiny"
    assert one.one("meta", name="viewport")["content"] == "width=device-width, initial-scale=1"
    names = ["text", "kept", "bytes", "run"]
    assert [section["id"] for section in one.all("section")] == names
    assert [link["href"] for link in one.one("nav").all("a")] == [f"#{name}" for name in names]
    ids = [node["id"] for node in one.all() if "id" in node.attributes]
    assert len(set(ids)) == len(ids)


def test_nothing_is_fetched_and_no_other_script_runs(one: Node) -> None:
    html = page(inspection()).decode()
    for outside in ("http://", "https://", "@import", "url("):
        assert outside not in html
    for node in one.all():
        assert node.name not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "srcset", "style"} & {*node.attributes}
        assert not [name for name in node.attributes if name.startswith("on")]
        assert node.attributes.get("href", "#").startswith("#")
    policy = one.one("meta", **{"http-equiv": "Content-Security-Policy"})["content"]
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed.pop("default-src") == "'none'"
    for name in ("style", "script"):
        digest = hashlib.sha256(one.one(name).text.encode()).digest()
        assert allowed.pop(f"{name}-src") == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert not allowed


def test_the_text_is_the_prompt_with_names_of_what_has_none(one: Node) -> None:
    assert [token.text for token in tokens(one)] == [text or "<s>" for text in TEXTS]
    assert one.one("div", id="prompt").text == "The harbour <b>\n\n<s>quiet"


def test_a_token_is_shaded_by_the_share_of_heads_that_keep_it(one: Node) -> None:
    classes = [token["class"].split() for token in tokens(one)]
    assert classes == [
        *(["t", "s8"], ["t", "s5"], ["t", "s5"], ["t", "s8", "n"], ["t", "s8", "silent"]),
        ["t", "s10"],
    ]
    assert tokens(one)[0]["title"] == "token 0\nk8v4 75.0%, not kept 25.0%"
    assert tokens(one)[4]["title"] == "token 4\nraw window 75.0%, not kept 25.0%"
    assert tokens(one)[5]["title"] == "token 5\nraw window 100.0%"


def test_shades_rise_and_only_none_and_all_have_the_ends() -> None:
    found = [level(i / 1000) for i in range(1001)]
    assert found == sorted(found)
    assert [found.count(0), found.count(LEVELS)] == [1, 1]
    style = tree(page(inspection())).one("style").text
    parts = [int(part) for part in re.findall(r"\.s\d+ \{\n  --part: (\d+)%", style)]
    assert len(parts) == LEVELS + 1
    assert parts == sorted(set(parts))
    assert (parts[0], parts[-1]) == (0, 100)


def test_the_map_says_what_each_head_holds(one: Node) -> None:
    section = one.one("section", id="kept")
    cells = section.one("svg").all("path", **{"aria-roledescription": "rect mark"})
    assert [cell["aria-label"] for cell in cells] == [
        "layer 0, head 0\n4 tokens",
        "layer 0, head 1\n5 tokens",
        "layer 1, head 0\n6 tokens",
        "layer 1, head 1\n2 tokens",
    ]
    items = section.one("ol").all("li")
    assert [(c["data-layer"], c["data-head"], c["data-held"]) for c in items] == [
        ("0", "0", HELD[0][0]),
        ("0", "1", HELD[0][1]),
        ("1", "0", HELD[1][0]),
        ("1", "1", HELD[1][1]),
    ]
    assert section.one("figcaption").text == "Least 2, mean 4.2, most 6 tokens."
    assert body(section.one("table")) == [["0", "4", "5"], ["1", "6", "2"]]


def test_every_token_is_in_a_table(one: Node) -> None:
    rows = body(one.one("section", id="text").one("table"))
    assert rows[0] == ["0", "'The'", "75.0", "75.0", "0.0"]
    assert rows[3] == ["3", r"'\n\n'", "75.0", "75.0", "0.0"]
    assert rows[5] == ["5", "'quiet'", "100.0", "0.0", "100.0"]


def test_bytes_add_up(one: Node) -> None:
    dash = "\N{EN DASH}"
    assert body(one.one("section", id="bytes").one("table")) == [
        ["k8v4", "10", "41.7", "2.5", "1,100"],
        ["raw window", "7", "29.2", "1.8", "200"],
        ["not kept", "7", "29.2", "1.8", dash],
        ["places in pages without a token", dash, dash, dash, "100"],
        ["free pages", dash, dash, dash, "60"],
        ["page tables", dash, dash, dash, "40"],
        ["maps into the basis", dash, dash, dash, "0"],
        ["held in all", "17", "70.8", "4.2", "1,500"],
        ["an uncompressed cache", "24", "100.0", "6.0", "6,000"],
    ]


def test_what_was_run_is_said(one: Node) -> None:
    assert facts(one.one("section", id="run")) == {
        "model": "tiny",
        "policy": "k8v4:window=2",
        "attention": "cpu avx2",
        "prompt": "6 tokens",
        "heads": "2 layers of 2",
        "versions": "torch 2.13.0",
    }


@pytest.mark.parametrize("bad", ["<script>alert(1)</script>", '"><b id=x>', "</title></style>&lt;"])
def test_a_prompt_is_shown_as_text(bad: str) -> None:
    plain = page(inspection())
    found = inspection(
        *((bad, f" {bad}"), (("01",),), (bad, "raw window")),
        **{"model": bad, "policy": bad, "versions": {bad: bad}},
    )
    html = tree(page(found))
    assert [node.name for node in html.all("script")] == ["script"]
    assert {n.name for n in html.all()} <= {n.name for n in tree(plain).all()}
    assert html.one("div", id="prompt").text == f"{bad} {bad}"
    assert tokens(html)[0]["title"] == f"token 0\n{bad} 100.0%"
    assert [name.text for name in html.all("span", class_="place")] == [bad, "raw window"]


def test_the_same_prompt_gives_the_same_page() -> None:
    assert page(inspection()) == page(inspection())
