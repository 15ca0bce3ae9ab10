"""Placement of short labels beside points, without covering points or each other."""

from collections.abc import Iterator, Sequence
from typing import Final

Spot = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom

CHARACTER: Final = 6.5  # width, in units of the picture
HEIGHT: Final = 9.0
REACH: Final = 5.0  # radius of a point
_DIRECTIONS: Final = ((1, 0), (0, -1), (-1, 0), (0, 1), (1, -1), (-1, -1), (-1, 1), (1, 1))


def spots(points: Sequence[Spot], labels: Sequence[str], inside: Box) -> tuple[Spot, ...]:
    """Return the centre of each label: the nearest free position beside its point.

    A label without a free position within some steps is placed to the right of its point.

    Args:
        points: centres, in units of the picture.
        labels: one for each point.
        inside: bounds of the labels.
    """
    taken = [_box(point, 2 * REACH, 2 * REACH) for point in points]
    found: list[Spot] = []
    for point, label in zip(points, labels, strict=True):
        width = CHARACTER * len(label)
        around = list(_around(point, width))
        spot = next(
            (s for s in around if _is_free(_box(s, width, HEIGHT), taken, inside)), around[0]
        )
        taken.append(_box(spot, width, HEIGHT))
        found.append(spot)
    return tuple(found)


def _around(point: Spot, width: float) -> Iterator[Spot]:
    for ring in range(6):
        for x, y in _DIRECTIONS:
            right = x * (REACH + 1.5 + width / 2 + ring * CHARACTER)
            down = y * (REACH + 1.5 + HEIGHT / 2 + ring * HEIGHT)
            yield point[0] + right, point[1] + down


def _box(middle: Spot, width: float, height: float) -> Box:
    x, y = middle
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _is_free(box: Box, taken: Sequence[Box], inside: Box) -> bool:
    left, top, right, bottom = box
    if left < inside[0] or top < inside[1] or right > inside[2] or bottom > inside[3]:
        return False
    return not any(left < b[2] and b[0] < right and top < b[3] and b[1] < bottom for b in taken)
