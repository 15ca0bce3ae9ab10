"""The page: whole without a script, of nothing but itself, and of what the files say."""

import base64
import hashlib
import re

import pytest

from kv_eval.report.chart import PLOT
from kv_eval.report.page import page
from result_files import Node, facts, row, source, tree

NLL = {"task": "nll", "setting": "agnostic", "full_score": 2.5, "samples": 6}
MAIN = (
    row("full", 1, 1000, seconds=4.0),
    row("k8v4", 0.9, 400, seconds=3.0),
    row("k4v4", 0.8, 500, seconds=5.0),
    row("k4v2", 0.5, 250, seconds=2.0),
    row("full", 2.5, 1000, **NLL),
    row("k8v4", 2.75, 400, **NLL),
    row("k2v2", 4.5, 500, **NLL),
)
KEPT = {"snapkv": ((10.0, 20.0), (40.0,))}
SPECTRA = {"keys": (((8.0, 4.0, 0.0), (2.0, 1.0)),)}


@pytest.fixture
def one() -> Node:
    return tree(page([source(*MAIN)]))


def sections(html: Node) -> list[str]:
    return [section["id"] for section in html.all("section")]


def charts(html: Node, section: str) -> list[Node]:
    return list(html.one("section", id=section).all("svg", class_="chart"))


def marks(chart: Node) -> dict[str, Node]:
    return {mark["data-name"]: mark for mark in chart.all("g", class_="mark")}


def place(mark: Node) -> tuple[float, float]:
    found = re.fullmatch(r"translate\((.+),(.+)\)", mark["transform"])
    assert found
    return float(found[1]), float(found[2])


def at(x: float, y: float) -> tuple[float, float]:
    """Give where a point is, as shares of the plot's width and height."""
    left, top, right, bottom = PLOT
    return (
        pytest.approx(left + x * (right - left), abs=0.01),
        pytest.approx(bottom - y * (bottom - top), abs=0.01),
    )


def line(chart: Node) -> list[tuple[float, float]]:
    pairs = chart.one("polyline", class_="line")["points"].split()
    return [tuple(map(float, pair.split(","))) for pair in pairs]


def body(table: Node) -> list[list[str]]:
    rows = table.one("tbody").all("tr")
    return [[cell.text for cell in row.all("td")] for row in rows]


# structure


def test_the_page_is_structured(one: Node) -> None:
    assert one["lang"] == "en"
    assert one.one("head").one("title").text == "Quality against bytes held: tiny"
    assert one.one("meta", name="viewport")["content"] == "width=device-width, initial-scale=1"
    assert sections(one) == ["quality", "speed", "run"]
    assert [link["href"] for link in one.one("nav").all("a")] == ["#quality", "#speed", "#run"]
    ids = [node["id"] for node in one.all() if "id" in node.attributes]
    assert len(set(ids)) == len(ids)
    for section in one.all("section"):
        assert section.one("h2")["id"] == section["aria-labelledby"]
    levels = [node.name for node in one.all() if node.name in ("h1", "h2", "h3")]
    assert levels == ["h1", "h2", "h3", "h3", "h2", "h3", "h2", "h3"]


def test_nothing_is_fetched(one: Node) -> None:
    html = page([source(*MAIN, kept=KEPT, spectra=SPECTRA)]).decode()
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert "url(" not in html
    for node in one.all():
        assert node.name not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "srcset", "style"} & {*node.attributes}
        assert not [name for name in node.attributes if name.startswith("on")]
        assert node.attributes.get("href", "#").startswith("#")


def test_no_other_script_can_run(one: Node) -> None:
    policy = one.one("meta", **{"http-equiv": "Content-Security-Policy"})["content"]
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed.pop("default-src") == "'none'"
    assert {*allowed} == {"style-src", "script-src"}
    for name in ("style", "script"):
        digest = hashlib.sha256(one.one(name).text.encode()).digest()
        assert allowed[f"{name}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"


def test_the_same_files_give_the_same_page() -> None:
    assert page([source(*MAIN)]) == page([source(*MAIN)])


# the frontier


def test_points_are_where_they_were_measured(one: Node) -> None:
    needle, nll = charts(one, "quality")
    found = {name: place(mark) for name, mark in marks(needle).items()}
    assert found == {
        "full": at(1.0, 1.0),
        "k8v4": at(0.4, 0.9),
        "k4v4": at(0.5, 0.8),
        "k4v2": at(0.25, 0.5),
    }
    found = {name: place(mark) for name, mark in marks(nll).items()}
    assert found == {"full": at(1.0, 0.0), "k8v4": at(0.4, 0.125), "k2v2": at(0.5, 1.0)}


def test_the_frontier_is_filled_and_joined(one: Node) -> None:
    needle, nll = charts(one, "quality")
    assert line(needle) == [place(marks(needle)[name]) for name in ("k4v2", "k8v4", "full")]
    assert line(nll) == [place(marks(nll)[name]) for name in ("k8v4", "full")]
    filled = [[m["data-name"] for m in chart.all("g", class_="on")] for chart in (needle, nll)]
    assert filled == [["full", "k8v4", "k4v2"], ["full", "k8v4"]]
    hollow = [[m["data-name"] for m in chart.all("g", class_="off")] for chart in (needle, nll)]
    assert hollow == [["k4v4"], ["k2v2"]]


def test_an_axis_says_which_direction_is_better(one: Node) -> None:
    needle, nll = (
        [t.text for t in c.one("g", class_="frame").all("text")] for c in charts(one, "quality")
    )
    assert needle[-1] == "right answers, share (higher is better)"
    assert nll[-1] == "nats per token over full (lower is better)"
    assert needle[-2] == nll[-2] == "bytes held, % of the full cache"


def test_a_point_names_its_policy_and_what_was_measured(one: Node) -> None:
    needle, nll = charts(one, "quality")
    mark = marks(nll)["k8v4"]
    assert (mark["tabindex"], mark["role"]) == ("0", "img")
    facts = ["score 2.750 nats per token, full 2.500", "40.0% of the full cache", "400 bytes"]
    assert mark["data-facts"].split("\n") == [*facts, "6 samples"]
    assert mark["aria-label"] == f"k8v4: {', '.join([*facts, '6 samples'])}"
    assert mark.one("title").text == mark["aria-label"]
    assert marks(needle)["k8v4"]["data-facts"].endswith("10 samples\n0.75 of full's seconds")


def test_points_have_the_numbers_of_the_table(one: Node) -> None:
    shown = [[t.text for t in c.all("text", class_="label")] for c in charts(one, "quality")]
    assert shown == [["1", "2", "3", "4"], ["1", "2", "5"]]
    tables = one.one("section", id="quality").all("table")
    rows = [[(row[0], row[1]) for row in body(table)] for table in tables]
    assert rows[1] == [("1", "full"), ("2", "k8v4"), ("5", "k2v2")]


# tables


def test_tables_can_be_sorted(one: Node) -> None:
    table = next(one.all("table"))
    heads = list(table.all("th"))
    assert [(h.text, h["data-sort"], h["scope"]) for h in heads] == [
        ("no.", "number", "col"),
        ("policy", "text", "col"),
        ("score", "number", "col"),
        ("95 %", "number", "col"),
        ("over full", "number", "col"),
        ("% of full", "number", "col"),
        ("bytes", "number", "col"),
        ("samples", "number", "col"),
        ("seconds", "number", "col"),
        ("frontier", "text", "col"),
    ]
    row = list(next(r for r in table.all("tr") if "k4v4" in r.text).all("td"))
    assert [cell.text for cell in row] == [
        *("3", "k4v4", "0.800", "", "\N{MINUS SIGN}0.200", "50.0", "500", "10", "5.0", "no")
    ]
    assert [cell["data-value"] for cell in row] == [
        *("3", "k4v4", "0.8", "", repr(0.8 - 1.0), "50.0", "500.0", "10", "5.0", "no")
    ]
    for cells in (heads, row):
        kinds = [head["data-sort"] for head in heads]
        shown = ["number" if cell["class"] == "number" else "text" for cell in cells]
        assert shown == kinds


def test_divergences_are_shown_where_they_were_measured() -> None:
    far = {"divergence": 0.0312, "divergence_tail": 0.75, "divergence_interval": (0.02, 0.04)}
    nll = tree(page([source(MAIN[0], MAIN[4], row("k8v4", 2.75, 400, **NLL, **far))]))
    needle, table, *_ = nll.all("table")
    assert "KL" not in needle.text
    heads = [head.text for head in table.all("th")]
    place = heads.index("KL")
    assert heads[place : place + 2] == ["KL", "KL 99.9 %"]
    assert [cells[place : place + 2] for cells in body(table)] == [
        ["\N{EN DASH}"] * 2,
        ["0.0312", "0.7500"],
    ]
    mark = marks(charts(nll, "quality")[1])["k8v4"]
    assert "KL 0.0312 nats from full" in mark["data-facts"].split("\n")


def test_a_wide_table_scrolls_in_a_box_that_has_the_focus(one: Node) -> None:
    boxes = list(one.all("div", class_="scroll"))
    assert len(boxes) == len(list(one.all("table"))) == 3
    for box in boxes:
        assert (box["tabindex"], box["role"]) == ("0", "region")
        assert box["aria-label"] == box.one("caption").text


def test_what_was_not_measured_is_a_dash(one: Node) -> None:
    second = list(one.all("table"))[1]
    cells = [list(row.all("td"))[8] for row in second.one("tbody").all("tr")]
    assert [(cell.text, cell["data-value"]) for cell in cells] == [("\N{EN DASH}", "")] * 3


# speed


def test_seconds_are_shown_where_they_are_there(one: Node) -> None:
    (chart,) = charts(one, "speed")
    found = {name: place(mark) for name, mark in marks(chart).items()}
    assert found == {
        "full": at(1.0, 2 / 3),
        "k8v4": at(0.4, 0.5),
        "k4v4": at(0.5, 1.25 / 1.5),
        "k4v2": at(0.25, 1 / 3),
    }
    assert float(chart.one("line", class_="rule")["y1"]) == at(0, 2 / 3)[1]
    assert [row[4] for row in body(one.one("section", id="speed").one("table"))] == [
        *("1.00", "0.75", "1.25", "0.50")
    ]


def test_without_seconds_there_is_no_such_section() -> None:
    alone = (row("full", 1, 1000, seconds=4.0), row("k8v4", 1, 400))
    assert sections(tree(page([source(*alone)]))) == ["quality", "run"]


# tokens kept, and spectra


def test_a_map_of_what_heads_keep() -> None:
    html = tree(page([source(*MAIN, kept=KEPT)]))
    assert sections(html) == ["quality", "speed", "kept", "run"]
    cells = list(html.one("svg", class_="heat").all("rect"))
    assert [(c["data-name"], c["data-facts"], c["fill-opacity"]) for c in cells] == [
        ("layer 0, head 0", "10.0 tokens", "0.25"),
        ("layer 0, head 1", "20.0 tokens", "0.5"),
        ("layer 1, head 0", "40.0 tokens", "1"),
    ]
    assert len({(cell["x"], cell["y"]) for cell in cells}) == 3
    section = html.one("section", id="kept")
    assert section.one("figcaption").text == "Least 10.0, mean 23.3, most 40.0 tokens."
    assert body(section.one("table")) == [["0", "10.0", "20.0"], ["1", "40.0", "\N{EN DASH}"]]


def test_heads_that_keep_nothing_are_drawn() -> None:
    html = tree(page([source(*MAIN, kept={"none": ((0.0,),)})]))
    assert html.one("svg", class_="heat").one("rect")["fill-opacity"] == "0"


def test_spectra_fall_from_one() -> None:
    html = tree(page([source(*MAIN, spectra=SPECTRA)]))
    assert sections(html) == ["quality", "speed", "spectra", "run"]
    (chart,) = charts(html, "spectra")
    first, second = chart.all("polyline", class_="head")
    assert [first.text, second.text] == ["layer 0, head 0", "layer 0, head 1"]
    tops = [float(pair.split(",")[1]) for pair in first["points"].split()]
    assert tops[0] == PLOT[1]
    assert tops[2] == PLOT[3]  # nothing is less than the floor
    assert len(second["points"].split()) == 2
    assert len(line(chart)) == 3
    assert body(html.one("section", id="spectra").one("table")) == [["0", "2", "2", "2"]]


# several files


def test_several_files_are_named_and_told_apart() -> None:
    other = source(row("k8v4", 1, 450), name="b.json", commit="beef")
    html = tree(page([source(*MAIN), other]))
    needle, _ = charts(html, "quality")
    names = ["full (a.json)", "k8v4 (a.json)", "k4v4 (a.json)", "k4v2 (a.json)", "k8v4 (b.json)"]
    assert list(marks(needle)) == names
    kinds = {name: mark["class"].split()[1] for name, mark in marks(needle).items()}
    assert kinds == {name: "k1" if "b.json" in name else "k0" for name in names}
    assert len(list(marks(needle)["k8v4 (b.json)"].all("path", class_="dot"))) == 1
    assert len(list(marks(needle)["k8v4 (a.json)"].all("circle", class_="dot"))) == 1
    assert [li.text for li in next(html.all("ul", class_="key")).all("li")] == ["a.json", "b.json"]
    table = next(html.all("table"))
    assert [head.text for head in table.all("th")][:3] == ["no.", "policy", "file"]
    assert body(table)[4][:3] == ["6", "k8v4", "b.json"]
    run = html.one("section", id="run")
    assert [head.text for head in run.all("h3")] == ["a.json", "b.json"]
    assert ["c0ffee" in a.text for a in run.all("article")] == [True, False]
    assert ["beef" in a.text for a in run.all("article")] == [False, True]


def test_other_samples_are_warned_of(one: Node) -> None:
    def notes(html: Node) -> list[str]:
        return [p.text for p in html.one("section", id="quality").all("p", class_="note")]

    assert notes(one) == []
    other = source(row("k8v4", 1, 400, samples=4, seed=1), name="b.json")
    (note,) = notes(tree(page([source(*MAIN), other])))
    assert "points have different samples (10 of seed 0, 4 of seed 1)" in note.lower()


# what was run


def test_what_was_run_can_be_run_again(one: Node) -> None:
    run = one.one("section", id="run")
    assert facts(run) == {
        "model": "tiny",
        "commit": "c0ffee",
        "attention": "cpu avx2",
        "tasks": "needle (aware), nll (agnostic)",
        "length": "200 tokens",
        "samples": "10, 6",
        "seed": "0",
        "versions": "torch 2.13.0",
    }
    assert [code.text for code in run.all("code")] == [
        "kv-serve eval --model tiny --policy k8v4 --policy k4v4 --policy k4v2 --task needle "
        "--setting aware --length 200 --samples 10 --seed 0 --json FILE",
        "kv-serve eval --model tiny --policy k8v4 --policy k2v2 --task nll "
        "--length 200 --samples 6 --seed 0 --json FILE",
    ]


def test_a_command_names_seeds_and_settings() -> None:
    settings = {"text": "a.txt 1f", "host": "vllm", "batch": 2, "continuation": 9, "seed": 4}
    rows = (row("k8v4", 1, 400, samples=6, seed=4, seeds=3, score_interval=(0.61, 1.0)),)
    html = tree(page([source(*rows, settings=settings, machine={"cores": 2})]))
    run = html.one("section", id="run")
    said = facts(run)
    assert said["seed"] == "4 to 6"
    assert said["settings"] == "text a.txt 1f, host vllm, batch 2, continuation 9"
    assert said["machine"] == "cores 2"
    command = run.one("code").text
    assert "--samples 2 --seed 4 --seeds 3 --host vllm --batch 2 --continuation 9 --json" in command
    assert "0.610\N{EN DASH}1.000" in next(html.all("table")).text


def test_a_command_is_safe_in_a_shell() -> None:
    html = tree(page([source(row("a; rm -r x", 1, 1000), model="my model")]))
    command = html.one("section", id="run").one("code").text
    assert "--model 'my model' --policy 'a; rm -r x' --task needle" in command


# what files say is text


@pytest.mark.parametrize("bad", ["<script>alert(1)</script>", '"><b id=x>', "</title></style>&lt;"])
def test_whatever_a_file_says_is_shown_as_text(bad: str) -> None:
    plain = page([source(*MAIN, kept=KEPT, spectra=SPECTRA), source(*MAIN, name="b.json")])
    rows = tuple(row(f"{bad}{i}", 0.5, 400, task=bad, setting=bad) for i in range(2))
    more = {
        **{"model": bad, "commit": bad, "versions": {bad: bad}},
        **{"kept": {bad: ((1.0,),)}, "spectra": {bad: (((1.0,),),)}},
    }
    html = tree(page([source(*rows, name=bad, **more), source(*rows, name="b.json", model=bad)]))
    assert [node.name for node in html.all("script")] == ["script"]
    assert {n.name for n in html.all()} <= {n.name for n in tree(plain).all()}
    assert html.one("head").one("title").text == f"Quality against bytes held: {bad}"
    assert body(next(html.all("table")))[0][1:3] == [f"{bad}0", bad]
    assert f"{bad}0 ({bad})" in marks(charts(html, "quality")[0])
