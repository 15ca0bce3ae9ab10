"""Composition of two selectors: one evicts tokens, the other merges them into kept ones."""

from kv_policy.complete import CompleteSelector
from kv_policy.contract import Selector


class MergedSelector(CompleteSelector):
    """Score, plan and evict as `evictor` does, and merge what it drops as `merger` does.

    The merger sees the scores of the evictor; its own scores and plans are not used.
    """

    def __init__(self, evictor: Selector, merger: CompleteSelector) -> None:
        """Combine two selectors.

        Raises:
            TypeError: the evictor drops tokens at steps or with chunks of prompts.
        """
        super().__init__(evictor)
        self.merge = merger.merge
        self._expect_plans_alone()
