"""Axes, labels and the small pieces that pages are made of."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_eval.report.labels import CHARACTER, HEIGHT, REACH, spots
from kv_eval.report.markup import tag, text
from kv_eval.report.scale import axis
from kv_eval.report.spectra import dimensions, relative

INSIDE = (0.0, 0.0, 400.0, 300.0)


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ([0.0, 100.0, 41.2], ["0", "20", "40", "60", "80", "100"]),
        ([0.0, 1.0], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (
            [0.0, 0.004, -0.001],
            ["\N{MINUS SIGN}0.001", "0.000", "0.001", "0.002", "0.003", "0.004"],
        ),
        ([0.0, 12000.0], ["0", "5,000", "10,000", "15,000"]),
    ],
)
def test_ticks_are_round(values: list[float], numbers: list[str]) -> None:
    found = axis("", values)
    assert [found.number(tick) for tick in found.ticks] == numbers


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5))
def test_an_axis_has_room_for_all_values(values: list[float]) -> None:
    found = axis("", values)
    assert list(found.ticks) == sorted(set(found.ticks))
    assert 2 <= len(found.ticks) <= 9
    for value in values:
        assert -1e-6 <= found.place(value, 0.0, 1.0) <= 1 + 1e-6


def test_an_axis_of_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot span"):
        axis("", [0.0, math.inf])


def test_places_may_run_downwards() -> None:
    found = axis("", [0.0, 10.0])
    assert [found.place(v, 200.0, 100.0) for v in (0.0, 2.5, 10.0)] == [200, 175, 100]


def test_labels_cover_neither_points_nor_each_other() -> None:
    points = [(200.0, 150.0)] * 6 + [(204.0, 152.0), (396.0, 4.0)]
    labels = [str(number) for number in range(7, 15)]
    found = spots(points, labels, INSIDE)
    sizes = [(CHARACTER * len(label), HEIGHT) for label in labels]
    boxes = [(*spot, *size) for spot, size in zip(found, sizes, strict=True)]
    for x, y, wide, high in boxes:
        assert wide / 2 <= x <= 400 - wide / 2
        assert high / 2 <= y <= 300 - high / 2
        for point in points:
            apart = abs(point[0] - x) >= wide / 2 + REACH or abs(point[1] - y) >= high / 2 + REACH
            assert apart
    for one, other in combinations(boxes, 2):
        apart = (abs(one[0] - other[0]) * 2, abs(one[1] - other[1]) * 2)
        assert apart[0] >= one[2] + other[2] or apart[1] >= one[3] + other[3]


def test_what_is_said_is_escaped() -> None:
    made = tag("td", {"title": '"<&', "x": 1 / 3, "hidden": None}, text("</td><script>&'"))
    assert made == (
        '<td title="&quot;&lt;&amp;" x="0.33">&lt;/td&gt;&lt;script&gt;&amp;&#x27;</td>'
    )
    assert tag("br") == "<br>"


def test_dimensions_are_counted_by_squares() -> None:
    values = (6.0, 6.0, 2.0, 2.0, 1.0)  # squares 36, 36, 4, 4, 1: 81
    assert [dimensions(values, share) for share in (0.4, 72 / 81, 0.9, 1.0)] == [1, 2, 3, 5]
    assert relative((4.0, 1.0)) == (1.0, 0.25)
    assert relative((0.0, 0.0)) == (0.0, 0.0)
    assert dimensions((0.0, 0.0), 0.9) == 1
