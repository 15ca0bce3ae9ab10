"""Quest: decode steps read the pages whose keys may give their queries the largest logits."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from kv_policy import Budget, PageReading, Part, RankedBy


@dataclass(frozen=True)
class Quest(Part):
    """Read in each decode step the pages that may matter to its query, as their keys rank them.

    Nothing is evicted: a page that one query does not read is there for the next. The bound of a
    page is the sum over channels of the larger product of the query with the largest and with the
    smallest number of its keys. Pages are selected for each sequence, layer and KV head, and a
    page is read first if it is best for some query of the group.

    With `by=codes` a page is ranked by the largest of the logits of its keys, computed from codes
    of 2 bits per dimension (`kv_policy.key_codes`). In pages of 16 tokens they take about as many
    bytes as bounds.

    The paper selects pages for each query head of a model without groups, of 16 tokens, and reads
    all pages in the first two layers; its code reads at least three.
    """

    name: ClassVar[str] = "quest"
    source: ClassVar[str] = (
        "Quest, Tang et al., 2024, https://arxiv.org/abs/2406.10774; by=codes: rotated codes of "
        "TurboQuant, Zandieh et al., 2025, https://arxiv.org/abs/2504.19874, with the scale of "
        "RaBitQ, Gao and Long, 2024, https://arxiv.org/abs/2405.12497"
    )

    budget: Annotated[
        Budget, Meta(description="read per KV head and step: tokens in whole pages, or % of pages")
    ] = Budget(25, "percent")
    sinks: Annotated[int, Meta(ge=0, description="first stored tokens, always read")] = 4
    recent: Annotated[int, Meta(ge=0, description="last stored tokens, always read")] = 16
    whole: Annotated[int, Meta(ge=0, description="first layers that read every page")] = 2
    by: Annotated[
        RankedBy, Meta(description="rank pages by bounds of their keys, or 2-bit codes of each key")
    ] = "bounds"

    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            ValueError: one is out of range, or the budget is in bytes.
        """
        super().__post_init__()
        if self.budget.unit == "bytes":
            raise ValueError(
                f"quest: budget={self.budget} is refused: give the tokens per KV head that a step "
                "reads, such as budget=1024, or a share of its pages, such as budget=25%"
            )

    @property
    def reading(self) -> PageReading:
        """The pages that a decode step reads."""
        return PageReading(self.budget, self.sinks, self.recent, self.whole, self.by)
