"""Token budgets: tokens per head, a share of the tokens seen, or bytes per token."""

import math
import re
from dataclasses import dataclass
from typing import Final, Literal

import torch
from jaxtyping import Int
from torch import Tensor

# Upper limit in tokens or bytes per token: above any sequence length; a product of two fits int64.
LARGEST: Final = 2**31 - 1

_FORM = re.compile(r"(?P<amount>\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?P<unit>%|B|)", re.IGNORECASE)
_UNITS: dict[str, Literal["tokens", "percent", "bytes"]] = {
    "": "tokens",
    "%": "percent",
    "B": "bytes",
}


@dataclass(frozen=True, slots=True)
class Budget:
    """Budget per KV head, on average over the heads that the policy plans together.

    Tokens are tokens per head. A percentage is a share of the tokens seen so far. Bytes are cache
    bytes per token seen, over all layers and heads, comparable to the bytes per token of a full
    cache (23,040 for SmolLM2-135M in bfloat16).

    >>> Budget.parse("1024"), Budget.parse("25%")
    (Budget(amount=1024, unit='tokens'), Budget(amount=25, unit='percent'))
    >>> Budget.parse("5760B")
    Budget(amount=5760, unit='bytes')
    >>> str(Budget(12.5, "percent"))
    '12.5%'
    """

    amount: int | float
    unit: Literal["tokens", "percent", "bytes"] = "tokens"

    def __post_init__(self) -> None:
        """Check amount and unit."""
        if self.unit not in _UNITS.values():
            raise ValueError(f"budget unit is {self.unit!r}; use tokens, percent or bytes")
        if self.unit != "percent" and LARGEST < self.amount < math.inf:
            raise ValueError(
                f"budget is {self.amount!r:.40} {self.unit}; use at most {LARGEST}, or 100% to "
                "keep every token"
            )
        if math.isfinite(self.amount) and self.amount == int(self.amount):
            object.__setattr__(self, "amount", int(self.amount))
        if not (math.isfinite(self.amount) and self.amount > 0):
            raise ValueError(f"budget is {self.amount} {self.unit}; it must be a number above 0")
        if self.unit == "tokens" and self.amount != int(self.amount):
            raise ValueError(f"budget is {self.amount} tokens; tokens are whole")
        if self.unit == "percent" and self.amount > 100:
            raise ValueError(f"budget is {self.amount}%; a share is at most 100%")

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Parse `1024` (tokens per head), `25%` (of the tokens seen) or `5760B` (bytes per token).

        Raises:
            ValueError: the text has none of these forms, or the amount is out of range.
        """
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"budget {text!r} is not understood; write tokens as 1024, a share as 25%, "
                "or bytes per token as 5760B"
            )
        return cls(float(match["amount"]), _UNITS[match["unit"].upper()])

    def resolve(
        self, length: Int[Tensor, " B"], token_bytes: int, least: int = 1
    ) -> Int[Tensor, " B"]:
        """Convert the budget to whole tokens per head, at most `LARGEST`.

        Args:
            length: tokens seen so far, per sequence.
            token_bytes: bytes of one stored token over all layers and heads.
            least: tokens the policy always keeps; the lower limit for a share or a byte budget.

        Values that are whole up to rounding, such as 9.2% of 750 tokens, count as whole.
        """
        most = min(LARGEST, torch.iinfo(length.dtype).max)
        if self.unit == "tokens":
            return torch.full_like(length, min(int(self.amount), most))
        whole = 100 if self.unit == "percent" else token_bytes
        if isinstance(self.amount, int):
            share = length.long().clamp(max=LARGEST) * self.amount // whole
        else:
            share = (length.double() * self.amount / whole + 1e-6).clamp(max=most).floor()
        return share.clamp(min=least, max=most).to(length.dtype)

    def expect_tokens(self, name: str) -> None:
        """Raise unless the budget is met whatever the length of a prompt, in tokens per head.

        Args:
            name: the selector, which plans after each chunk of a prompt; it begins the message.

        Raises:
            ValueError: the budget is a share of the tokens seen, or bytes per token.
        """
        if self.unit != "tokens":
            raise ValueError(
                f"{name} plans after each chunk of a prompt, whose length is not known then, so it "
                f"cannot keep {self} of it; give a number of tokens per head, such as 1024"
            )

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        unit = next(mark for mark, name in _UNITS.items() if name == self.unit)
        return f"{self.amount!r}{unit}"
