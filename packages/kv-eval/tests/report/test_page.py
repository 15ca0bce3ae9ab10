"""The page: whole without a script, of nothing but itself, and of what the files say."""

import base64
import hashlib
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kv_eval.report.frontier import panels
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
    """Give the points by the first line of what a reader is told of them."""
    found = chart.all("path", **{"aria-roledescription": "point"})
    return {mark["aria-label"].split("\n")[0]: mark for mark in found}


def place(mark: Node) -> tuple[float, float]:
    found = re.match(r"translate\(([^,]+),([^)]+)\)", mark["transform"])
    assert found
    return float(found[1]), float(found[2])


def ticks(chart: Node) -> list[tuple[list[float], list[float]]]:
    """Give the values and places of the grid's lines, across and up."""
    labels, grids = (
        [list(axis.all(kind)) for axis in chart.all("g", class_=f"role-axis-{part}")]
        for part, kind in (("label", "text"), ("grid", "line"))
    )
    values = [[float(t.text.replace("\N{MINUS SIGN}", "-")) for t in each] for each in labels]
    grids += [[]] * (len(labels) - len(grids))
    places = [[place(line)[i] for line in lines] for i, lines in enumerate(grids)]
    return list(zip(values, places, strict=True))


def read(at: float, axis: tuple[list[float], list[float]]) -> float:
    """Read a value off an axis."""
    (values, places) = axis
    slope = (values[-1] - values[0]) / (places[-1] - places[0])
    return values[0] + slope * (at - places[0])


def measured(chart: Node) -> dict[str, tuple[float, float]]:
    """Read the points off the axes."""
    x, y = ticks(chart)
    return {
        name: (read(place(mark)[0], x), read(place(mark)[1], y))
        for name, mark in marks(chart).items()
    }


def about(x: float, y: float) -> tuple[float, float]:
    """Give values as they can be read off a picture: a line of the grid is on a whole unit."""
    return pytest.approx(x, abs=0.4), pytest.approx(y, abs=0.008)


def line(chart: Node, at: int = 0) -> list[tuple[float, float]]:
    path = list(chart.one("g", class_=f"layer_{at}_marks").all("path"))[-1]["d"]
    return [tuple(map(float, pair.split(","))) for pair in re.findall(r"[^MLZ]+", path)]


def words(chart: Node, part: str) -> list[str]:
    return [t.text for group in chart.all("g", class_=part) for t in group.all("text")]


def body(table: Node) -> list[list[str]]:
    rows = table.one("tbody").all("tr")
    return [[cell.text for cell in row.all("td")] for row in rows]


# structure


def test_the_page_is_structured(one: Node) -> None:
    assert one["lang"] == "en"
    assert one.one("head").one("title").text == "Quality against bytes held: tiny"
    assert one.one("meta", name="viewport")["content"] == "width=device-width, initial-scale=1"
    assert sections(one) == ["quality", "run"]
    assert [link["href"] for link in one.one("nav").all("a")] == ["#quality", "#run"]
    ids = [node["id"] for node in one.all() if "id" in node.attributes]
    assert len(set(ids)) == len(ids)
    for section in one.all("section"):
        assert section.one("h2")["id"] == section["aria-labelledby"]
    levels = [node.name for node in one.all() if node.name in ("h1", "h2", "h3")]
    assert levels == ["h1", "h2", "h3", "h3", "h2", "h3"]


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


def test_a_page_of_many_policies_can_be_mailed() -> None:
    policies = ["full", *(f"policy{i}" for i in range(1, 20))]
    rows = [
        row(policy, i / 20, 50 * (20 - i), seconds=1.0 + i, task=task)
        for task in ("needle", "multikey", "nll")
        for i, policy in enumerate(policies)
    ]
    kept = {f"policy{i}": ((100.0,) * 8,) * 32 for i in range(10)}
    spectra = {"keys": ((tuple(1 / i for i in range(1, 129)),) * 8,) * 32}
    assert len(page([source(*rows, kept=kept, spectra=spectra)])) < 2e6


def test_the_same_files_give_the_same_page() -> None:
    assert page([source(*MAIN)]) == page([source(*MAIN)])


# the frontier


def test_points_are_where_they_were_measured(one: Node) -> None:
    needle, _, nll = charts(one, "quality")
    assert measured(needle) == {
        "full": about(100, 1.0),
        "k8v4": about(40, 0.9),
        "k4v4": about(50, 0.8),
        "k4v2": about(25, 0.5),
    }
    found = measured(nll)
    x = [value[0] for value in found.values()]
    assert [*found] == ["full", "k8v4", "k2v2"]
    assert x == pytest.approx([100, 40, 50], abs=0.4)
    assert [value[1] for value in found.values()] == pytest.approx([0, 0.25, 2.0], abs=0.01)


def test_the_frontier_is_filled_and_joined(one: Node) -> None:
    needle, _, nll = charts(one, "quality")
    for chart, best in ((needle, ("k4v2", "k8v4", "full")), (nll, ("k8v4", "full"))):
        joined = [pytest.approx(place(marks(chart)[name]), abs=0.001) for name in best]
        assert line(chart) == joined
        filled = [name for name, mark in marks(chart).items() if mark["fill"] == "var(--k0)"]
        hollow = [name for name, mark in marks(chart).items() if mark["fill"] == "var(--paper)"]
        assert sorted(filled) == sorted(best)
        assert len(filled) + len(hollow) == len(marks(chart))


def test_an_axis_says_which_direction_is_better(one: Node) -> None:
    needle, _, nll = charts(one, "quality")
    assert words(needle, "role-title-text") == ["right answers, share (higher is better)"]
    assert words(nll, "role-title-text") == ["nats per token over full (lower is better)"]
    for chart in (needle, nll):
        assert words(chart, "role-axis-title") == ["bytes held, % of the full cache"]


def test_a_point_names_its_policy_and_what_was_measured(one: Node) -> None:
    needle, _, nll = charts(one, "quality")
    facts = ["score 2.750 nats per token, full 2.500", "40.0% of the full cache", "400 bytes"]
    assert marks(nll)["k8v4"]["aria-label"].split("\n") == ["k8v4", *facts, "6 samples"]
    assert marks(needle)["k8v4"]["aria-label"].endswith("10 samples\n0.75 of full's seconds")


def test_points_have_the_numbers_of_the_table(one: Node) -> None:
    needle, _, nll = charts(one, "quality")
    shown = [sorted(words(chart, "role-mark")) for chart in (needle, nll)]
    assert shown == [["1", "2", "3", "4"], ["1", "2", "5"]]
    tables = one.one("section", id="quality").all("table")
    rows = [[(row[0], row[1]) for row in body(table)] for table in tables]
    assert rows[1] == [("1", "full"), ("2", "k8v4"), ("5", "k2v2")]


def test_points_that_are_near_share_one_number() -> None:
    rows = (MAIN[0], row("a", 0.9, 400), row("b", 0.91, 440), row("c", 0.2, 400))
    (chart,) = charts(tree(page([source(*rows)])), "quality")
    assert sorted(words(chart, "role-mark")) == ["1", "2, 3", "4"]


@pytest.mark.parametrize("task", ["needle", "nll"])
def test_an_interval_is_a_bar_through_its_point(task: str) -> None:
    known = {"change_interval": (0.1, 0.4), "score_interval": (0.5, 0.8)}
    score = 1.25 if task == "nll" else 0.7
    rows = (row("full", 1, 1000, task=task), row("k8v4", score, 400, task=task, **known))
    (chart,) = charts(tree(page([source(*rows)])), "quality")
    (bar,) = chart.one("g", class_="layer_1_marks").all("line")
    _, y = ticks(chart)
    across, low = place(bar)
    assert across == pytest.approx(place(marks(chart)["k8v4"])[0])
    ends = sorted(read(low + end, y) for end in (0.0, float(bar["y2"])))
    assert ends == pytest.approx([0.1, 0.4] if task == "nll" else [0.5, 0.8], abs=0.008)


def test_policies_of_equal_bytes_have_rows_and_no_line() -> None:
    held = {"a": 400, "b": 405, "c": 419}
    known = {"score_interval": (0.25, 0.75)}
    rows = (row("full", 1, 1000), *(row(name, 0.5, n, **known) for name, n in held.items()))
    html = tree(page([source(*rows)]))
    (chart,) = charts(html, "quality")
    (note,) = html.one("section", id="quality").all("p", class_="note")
    assert "about the same bytes" in note.text
    assert not list(chart.all("g", class_="mark-line"))
    assert words(chart, "role-mark") == ["1  full", "2  a", "3  b", "4  c"]
    (axis,) = ticks(chart)
    found = {name: read(place(mark)[0], axis) for name, mark in marks(chart).items()}
    assert found == pytest.approx({"full": 1.0, "a": 0.5, "b": 0.5, "c": 0.5}, abs=0.005)
    heights = [place(mark)[1] for mark in marks(chart).values()]
    assert len({*heights}) == 4
    assert heights == sorted(heights)
    for bar in chart.one("g", class_="layer_0_marks").all("line"):
        ends = sorted(read(place(bar)[0] + end, axis) for end in (0.0, float(bar["x2"])))
        assert ends == pytest.approx([0.25, 0.75], abs=0.005)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_bytes_are_equal_if_all_are_near_each_other(held: list[int]) -> None:
    apart = max(abs(a - b) for a in held for b in held)  # of 1,000
    assume(apart != 20)  # where rounding decides
    rows = [row(f"p{i}", 0.5, each) for i, each in enumerate(held)]
    (panel,) = panels([source(row("full", 1, 1000), *rows)])
    assert panel.equal == (len(held) > 1 and apart < 20)


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
        ("\N{MULTIPLICATION SIGN} full's", "number", "col"),
        ("frontier", "text", "col"),
    ]
    row = list(next(r for r in table.all("tr") if "k4v4" in r.text).all("td"))
    assert [cell.text for cell in row] == [
        *("3", "k4v4", "0.800", "", "\N{MINUS SIGN}0.200", "50.0", "500", "10", "5.0", "1.25", "no")
    ]
    assert [cell["data-value"] for cell in row] == [
        *("3", "k4v4", "0.8", "", repr(0.8 - 1.0), "50.0", "500.0", "10", "5.0", "1.25", "no")
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
    assert "KL 0.0312 nats from full" in mark["aria-label"].split("\n")


def test_a_wide_table_scrolls_in_a_box_that_has_the_focus(one: Node) -> None:
    boxes = list(one.all("div", class_="scroll"))
    assert len(boxes) == len(list(one.all("table"))) == 2
    for box in boxes:
        assert (box["tabindex"], box["role"]) == ("0", "region")
        assert box["aria-label"] == box.one("caption").text


def test_what_was_not_measured_is_a_dash(one: Node) -> None:
    second = list(one.all("table"))[1]
    cells = [list(row.all("td"))[8] for row in second.one("tbody").all("tr")]
    assert [(cell.text, cell["data-value"]) for cell in cells] == [("\N{EN DASH}", "")] * 3


# speed


def test_seconds_are_shown_where_they_are_there(one: Node) -> None:
    assert len(charts(one, "quality")) == 3  # none for nll, where they were not measured
    chart = charts(one, "quality")[1]
    (axis,) = ticks(chart)
    found = {name: read(place(mark)[0], axis) for name, mark in marks(chart).items()}
    times = {"full": 1.0, "k8v4": 0.75, "k4v4": 1.25, "k4v2": 0.5}
    assert found == pytest.approx(times, abs=0.005)
    assert words(chart, "role-mark") == ["1  full", "2  k8v4", "3  k4v4", "4  k4v2"]
    assert [row[-2] for row in body(next(one.all("table")))] == ["1.00", "0.75", "1.25", "0.50"]


def test_seconds_of_full_alone_are_not_drawn() -> None:
    alone = (row("full", 1, 1000, seconds=4.0), row("k8v4", 1, 400))
    assert len(charts(tree(page([source(*alone)])), "quality")) == 1


# tokens kept, and spectra


def test_a_map_of_what_heads_keep() -> None:
    html = tree(page([source(*MAIN, kept=KEPT)]))
    assert sections(html) == ["quality", "kept", "run"]
    (chart,) = charts(html, "kept")
    cells = list(chart.all("path", **{"aria-roledescription": "rect mark"}))
    assert [(c["aria-label"], c["fill-opacity"]) for c in cells] == [
        ("layer 0, head 0\n10.0 tokens", "0.25"),
        ("layer 0, head 1\n20.0 tokens", "0.5"),
        ("layer 1, head 0\n40.0 tokens", "1"),
    ]
    assert len({cell["d"] for cell in cells}) == 3
    section = html.one("section", id="kept")
    assert section.one("figcaption").text == "Least 10.0, mean 23.3, most 40.0 tokens."
    assert body(section.one("table")) == [["0", "10.0", "20.0"], ["1", "40.0", "\N{EN DASH}"]]


def test_heads_that_keep_nothing_are_drawn() -> None:
    html = tree(page([source(*MAIN, kept={"none": ((0.0,),)})]))
    cell = charts(html, "kept")[0].one("path", **{"aria-roledescription": "rect mark"})
    assert cell["fill-opacity"] == "0"


def test_spectra_fall_from_one() -> None:
    values = {"keys": (((8.0, 4.0, 0.0), (2.0, 1.0, 0.0)), ((1.0, 0.1),))}
    html = tree(page([source(*MAIN, spectra=values)]))
    assert sections(html) == ["quality", "spectra", "run"]
    (chart,) = charts(html, "spectra")
    layers = list(chart.all("path", **{"aria-roledescription": "line mark"}))[:2]
    told = ["layer 0\nmedian over its heads", "layer 1\nmedian over its heads"]
    assert [path["aria-label"] for path in layers] == told
    top, half, bottom = (y for _, y in line(chart, 1))
    powers, heights = ticks(chart)[1]
    assert powers == [0.0001, 0.001, 0.01, 0.1, 1]
    assert (top, bottom) == pytest.approx((heights[-1], heights[0]), abs=0.6)  # nothing is below
    assert heights[-1] < half < heights[-2]
    assert body(html.one("section", id="spectra").one("table")) == [
        ["0", "2", "2", "2"],
        ["1", "1", "1", "1"],
    ]


# several files


def test_several_files_are_named_and_told_apart() -> None:
    other = source(row("k8v4", 1, 450), name="b.json", commit="beef")
    html = tree(page([source(*MAIN), other]))
    needle = charts(html, "quality")[0]
    names = ["full (a.json)", "k8v4 (a.json)", "k4v4 (a.json)", "k4v2 (a.json)", "k8v4 (b.json)"]
    assert list(marks(needle)) == names
    kinds = {name: mark["stroke"] for name, mark in marks(needle).items()}
    assert kinds == {name: f"var(--k{int('b.json' in name)})" for name in names}
    shapes = {name: mark["d"] for name, mark in marks(needle).items()}
    assert len({*shapes.values()}) == 2
    assert [name for name, shape in shapes.items() if shape != shapes["full (a.json)"]] == [
        "k8v4 (b.json)"
    ]
    assert words(needle, "role-legend-label") == ["a.json", "b.json"]
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
    chart = charts(html, "quality")[0]
    assert f"{bad}0 ({bad})" in marks(chart)
    assert f"1  {bad}0 ({bad})" in words(chart, "role-mark")
