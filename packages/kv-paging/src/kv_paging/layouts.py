"""Page layouts of the tiers of a pool: compatibility, and the best common page size."""

from collections.abc import Sequence

from kv_policy import PageLayout, TokenFormat


def expect_alike(layouts: Sequence[PageLayout]) -> None:
    """Raise if tokens cannot move between these tiers.

    Raises:
        ValueError: no tier, scores or positions stored in some tiers only, or vectors of different
            dimensions.
    """
    if not layouts:
        raise ValueError("no tier is given; give the page layout of one at least")
    beside = {(layout.scores, layout.positions) for layout in layouts}
    if len(beside) > 1:
        raise ValueError(
            "some tiers store scores or positions and others do not; tokens move between them, so "
            "use the same for all layouts"
        )
    dims = {(layout.format.key.dim, layout.format.value.dim) for layout in layouts}
    if len(dims) > 1:
        raise ValueError(
            f"the tiers store vectors of {sorted(dims)} dimensions; tokens move between them, so "
            "all must store the same"
        )


def waiting_layout(layout: PageLayout, raw: TokenFormat | None) -> PageLayout:
    """Return the page layout of the residual tokens, which do not fill a block of `layout` yet."""
    if raw is None:
        raise ValueError(
            f"a tier encodes {layout.format.block} tokens together; pass `raw`, the format of "
            "tokens until a block is full"
        )
    return PageLayout.fitted(raw, layout.nbytes, layout.scores, layout.positions)


def fit(
    formats: Sequence[TokenFormat],
    tokens: int = 16,
    scores: bool = False,
    positions: bool = False,
    bounds: bool = False,
    coded: bool = False,
) -> tuple[PageLayout, ...]:
    """Return layouts of equal pages for several formats, with the fewest unused bytes.

    A page of a format that takes b bytes per block (its codes and metadata, and 4 bytes each for
    the score and the position of every token) holds nbytes // b blocks, and nbytes % b bytes of it
    are unused. The candidates are all pages that blocks of the first format fill exactly, of about
    `tokens` tokens: from half of that to twice as much, and at least a block of each format. The
    one with the smallest unused share, over all formats, is chosen; on a tie the nearest to
    `tokens`.

    With one format nothing is unused and a page holds `tokens` tokens, rounded to whole blocks.
    K8V4 and K4V2 at 64 dimensions with scores and positions take 112 and 64 bytes per token: 16 of
    the first and 28 of the second fill 1,792 bytes exactly.

    Args:
        formats: of the tiers, best first.
        tokens: approximate number of tokens of the first format per page.
        scores: pages hold a float32 score per token.
        positions: pages hold an int32 position per token.
        bounds: pages of the only format hold bounds of their keys.
        coded: they hold codes of their keys in the place of bounds.

    Raises:
        ValueError: no format, tokens below 1, or a page of twice as many tokens is still smaller
            than a block of some format; or bounds for several formats.
    """
    if not formats:
        raise ValueError("no format is given; give at least that of one tier")
    if tokens < 1:
        raise ValueError(f"a page cannot hold {tokens} tokens; use at least 1")
    first = formats[0]
    blocks = max(1, -(-tokens // first.block))
    if bounds and len(formats) > 1:
        raise ValueError(
            f"pages of {len(formats)} formats are to have bounds of their keys; give one format"
        )
    if bounds:
        return (PageLayout.sized(first, blocks * first.block, scores, positions, bounds, coded),)
    beside = 4 * (scores + positions)
    bytes_of = [form.nbytes + form.block * beside for form in formats]
    if 2 * blocks * bytes_of[0] < max(bytes_of):
        worst = bytes_of.index(max(bytes_of))
        raise ValueError(
            f"a page of {tokens} tokens of the first format has about {blocks * bytes_of[0]} "
            f"bytes, and {formats[worst].block} tokens of tier {worst}, which are encoded "
            f"together, take {bytes_of[worst]}; use larger pages"
        )

    def unused(count: int) -> tuple[float, int]:
        nbytes = count * bytes_of[0]
        return sum(nbytes % size for size in bytes_of) / nbytes, abs(count - blocks)

    sizes = range(max(1, blocks // 2), 2 * blocks + 1)
    large = [count for count in sizes if count * bytes_of[0] >= max(bytes_of)]
    nbytes = min(large, key=unused) * bytes_of[0]
    return tuple(PageLayout.fitted(form, nbytes, scores, positions) for form in formats)
