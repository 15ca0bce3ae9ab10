"""Small SVG pictures readable on light and dark pages; equal input gives equal bytes."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final, Literal

INK: Final = "#77808a"  # about equal contrast with white and the dark page, about 4 to 1
MARK: Final = "#159187"
OTHER: Final = "#c8662b"
LEVELS: Final = 8  # shades of a heat map

Point = tuple[float, float]


def svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Compose parts; the background is transparent, and the title is for screen readers."""
    size = f'width="{number(width)}" height="{number(height)}"'
    box = f'viewBox="0 0 {number(width)} {number(height)}"'
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img" fill="{INK}" '
        'font-family="system-ui, sans-serif" font-size="12">'
    )
    return "\n".join([opening, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def words(
    x: float,
    y: float,
    text: str,
    anchor: Literal["start", "middle", "end"] = "start",
    *,
    bold: bool = False,
) -> str:
    """Write a line of text with its baseline at `y`."""
    given = f'x="{number(x)}" y="{number(y)}"'
    given += "" if anchor == "start" else f' text-anchor="{anchor}"'
    given += ' font-weight="600"' if bold else ""
    return f"<text {given}>{escape(text, quote=False)}</text>"


def box(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1) -> str:
    """Fill a rectangle."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    shade = "" if opacity == 1 else f' fill-opacity="{number(opacity)}"'
    return f'<rect {place} fill="{colour}"{shade}/>'


def frame(x: float, y: float, width: float, height: float) -> str:
    """Draw the outline of a rectangle, thinly."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect {place} fill="none" stroke="{INK}" stroke-opacity="0.5"/>'


def line(points: Sequence[Point], colour: str = INK, *, faint: bool = False) -> str:
    """Draw a line through points."""
    shade = ' stroke-opacity="0.4"' if faint else ' stroke-width="2"'
    return f'<polyline points="{_places(points)}" fill="none" stroke="{colour}"{shade}/>'


def band(upper: Sequence[Point], lower: Sequence[Point], colour: str) -> str:
    """Fill the area between two lines that run the same way."""
    places = _places([*upper, *reversed(lower)])
    return f'<polygon points="{places}" fill="{colour}" fill-opacity="0.25"/>'


def heat(
    rows: Sequence[Sequence[float]],
    most: float,
    at: Point,
    cell: Point,
    colour: str = MARK,
) -> str:
    """Draw amounts as cells of `LEVELS` shades: 0 is empty, `most` is opaque.

    Neighbours of equal shade in a row are one rectangle, and a shade is one path, to keep files
    small.

    Args:
        rows: of equal length.
        most: above 0.
        at: the upper left corner.
        cell: width and height of a cell.
        colour: of the darkest shade.
    """
    runs: dict[int, list[str]] = {}
    for y, row in enumerate(rows):
        shades = [level(amount / most) for amount in row]
        start = 0
        for x in range(1, len(shades) + 1):
            if x == len(shades) or shades[x] != shades[start]:
                if shades[start]:
                    width = x - start
                    runs.setdefault(shades[start], []).append(f"M{start} {y}h{width}v1h-{width}z")
                start = x
    paths = (
        f'<path fill-opacity="{number(shade / LEVELS)}" d="{"".join(runs[shade])}"/>'
        for shade in sorted(runs)
    )
    place = f"translate({number(at[0])} {number(at[1])}) scale({number(cell[0])} {number(cell[1])})"
    opening = f'<g transform="{place}" fill="{colour}" shape-rendering="crispEdges">'
    return "\n".join([opening, *paths, "</g>"])


def level(share: float) -> int:
    """Return the shade of a share; only 0 is empty, and only 1 is the darkest."""
    if share <= 0:
        return 0
    return LEVELS if share >= 1 else min(LEVELS - 1, 1 + int(share * (LEVELS - 1)))


def number(value: float) -> str:
    """Write a number with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _places(points: Iterable[Point]) -> str:
    return " ".join(f"{number(x)},{number(y)}" for x, y in points)
