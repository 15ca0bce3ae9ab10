"""The small pieces that pages are made of."""

from kv_eval.report.markup import tag, text
from kv_eval.report.spectra import dimensions, relative


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
