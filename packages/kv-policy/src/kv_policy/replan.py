"""When a policy plans again while tokens are generated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replan:
    """After prompts only, unless one of the first three says more (KV-Compress, section 4.2.3).

    Sequences that are due are planned oldest plan first, those that were never planned before all
    others. A sequence that would take a plan beyond `most` waits for the next forward pass, and
    keeps all its tokens until then; one that has more alone is planned alone. Where pages are short
    no more sequences are planned than free what is short, in the same order.
    """

    every: int = 0  # plan all sequences after so many forward passes that generate; 0: never
    uncompressed: int = 0  # plan all once so many tokens of the batch came after a plan; 0: never
    short: bool = False  # plan when the pool has no page left for a step
    most: int | None = None  # tokens over all layers and heads that one plan takes; None: any

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("every", "uncompressed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; say 0 for never, or a number")
        if self.most is not None and self.most < 1:
            raise ValueError(f"most is {self.most}; a plan takes at least 1 token, or None: any")

    @property
    def generating(self) -> bool:
        """Whether anything is planned while tokens are generated, but for what waited."""
        return bool(self.every or self.uncompressed or self.short)
