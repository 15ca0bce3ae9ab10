"""How the pages of tiers that share a pool are laid out."""

from collections.abc import Sequence

from kv_policy import PageLayout, TokenFormat


def expect_alike(layouts: Sequence[PageLayout]) -> None:
    """Refuse tiers between which tokens cannot move.

    Raises:
        ValueError: no tier, layouts that store scores or positions in some tiers only, or vectors
            of different dimensions.
    """
    if not layouts:
        raise ValueError("no tier is given; give the page layout of one at least")
    beside = {(layout.scores, layout.positions) for layout in layouts}
    if len(beside) > 1:
        raise ValueError(
            "some tiers store scores or positions and others do not; tokens move between them, so "
            "lay all out alike"
        )
    dims = {(layout.format.key.dim, layout.format.value.dim) for layout in layouts}
    if len(dims) > 1:
        raise ValueError(
            f"the tiers store vectors of {sorted(dims)} dimensions; tokens move between them, so "
            "all must store the same"
        )


def waiting_layout(layout: PageLayout, raw: TokenFormat | None) -> PageLayout:
    """Lay out a page of the tokens that wait until they fill a block of this layout."""
    if raw is None:
        raise ValueError(
            f"a tier encodes {layout.format.block} tokens together; say as `raw` how they are "
            "stored until there are so many"
        )
    return PageLayout.fitted(raw, layout.nbytes, layout.scores, layout.positions)
