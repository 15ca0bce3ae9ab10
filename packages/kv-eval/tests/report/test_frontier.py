"""Which points no other is better than, and what is compared with what."""

from hypothesis import given
from hypothesis import strategies as st

from kv_eval.report.frontier import panels, pareto
from result_files import row, source

POINTS = st.tuples(st.integers(0, 4), st.integers(0, 4))


def test_the_frontier_of_scores() -> None:
    places = [(0.2, 0.5), (0.3, 0.5), (0.3, 0.9), (0.5, 0.8), (1.0, 1.0)]
    assert pareto(places, lower=False) == (True, False, True, False, True)


def test_the_frontier_of_losses() -> None:
    places = [(0.2, 0.5), (0.3, 0.5), (0.3, 0.9), (0.5, 0.1), (1.0, 0.1)]
    assert pareto(places, lower=True) == (True, False, False, True, False)


def test_equal_places_are_on_it_together() -> None:
    assert pareto([(0.5, 1.0), (0.5, 1.0), (0.6, 1.0)], lower=False) == (True, True, False)
    assert pareto([(0.6, 1.0), (0.6, 1.0), (0.5, 1.0)], lower=False) == (False, False, True)


@given(st.lists(POINTS, min_size=1, max_size=8), st.booleans())
def test_whoever_is_off_the_frontier_is_beaten_by_one_on_it(
    points: list[tuple[int, int]], lower: bool
) -> None:
    places = [(float(x), float(y)) for x, y in points]
    on = pareto(places, lower=lower)
    assert any(on)
    best = [place for place, is_on in zip(places, on, strict=True) if is_on]
    for x, y in (place for place, is_on in zip(places, on, strict=True) if not is_on):
        assert any(a <= x and (b <= y if lower else b >= y) and (a, b) != (x, y) for a, b in best)


def test_a_loss_is_over_that_of_the_full_cache() -> None:
    nll = {"task": "nll", "setting": "agnostic", "full_score": 2.5}
    rows = (row("full", 2.5, 1000, **nll), row("k8v4", 2.75, 400, **nll), row("x", 3, 500, **nll))
    (panel,) = panels([source(*rows)])
    assert panel.lower
    assert [point.quality for point in panel.points] == [0.0, 0.25, 0.5]
    assert [(p.row.policy, p.share) for p in panel.frontier] == [("k8v4", 0.4), ("full", 1.0)]


def test_only_what_can_be_compared_is_in_one_panel() -> None:
    rows = (
        row("full", 1, 1000),
        row("k8v4", 1, 400, setting="agnostic"),
        row("k8v4", 1, 400, task="multikey"),
        row("k8v4", 1, 400, length=300),
    )
    found = panels([source(*rows), source(row("k4v2", 0.5, 300), name="b.json")])
    assert [(p.task, p.setting, p.length, len(p.points)) for p in found] == [
        ("needle", "aware", 200, 2),
        ("needle", "agnostic", 200, 1),
        ("multikey", "aware", 200, 1),
        ("needle", "aware", 300, 1),
    ]


def test_a_policy_has_one_number_and_another_in_another_file() -> None:
    rows = (row("full", 1, 1000), row("k8v4", 1, 400), row("k8v4", 1, 400, length=300))
    found = panels([source(*rows), source(row("k8v4", 1, 500), name="b.json")])
    assert [[(p.source, p.number) for p in panel.points] for panel in found] == [
        [(0, 1), (0, 2), (1, 3)],
        [(0, 2)],
    ]


def test_seconds_are_over_those_of_full_in_the_same_file_and_task() -> None:
    first = source(
        row("full", 1, 1000, seconds=4.0),
        row("k8v4", 1, 400, seconds=3.0),
        row("untimed", 1, 400),
        row("k8v4", 1, 400, seconds=3.0, length=300),
    )
    second = source(row("k8v4", 1, 400, seconds=3.0), name="b.json")
    third = source(row("full", 1, 1000, seconds=2.0), row("x", 1, 9, seconds=3.0), name="c.json")
    near, far = panels([first, second, third])
    assert [point.times for point in near.points] == [1.0, 0.75, None, None, 1.0, 1.5]
    assert [point.times for point in far.points] == [None]
