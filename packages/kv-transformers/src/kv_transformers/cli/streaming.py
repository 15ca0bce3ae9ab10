"""Showing text as it is generated, and timing it."""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class TimedStreamer:
    """Prints the text of generated tokens on standard output and notes when each came."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Leave the prompt out, and the tokens that only mark beginnings and ends."""
        from transformers import TextStreamer

        self._text: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._times: list[float] = []

    def put(self, value: "Tensor") -> None:
        """Take the prompt first, then token after token."""
        self._times.append(time.perf_counter())
        self._text.put(value)

    def end(self) -> None:
        """Print what is left."""
        self._text.end()

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return max(len(self._times) - 1, 0)

    @property
    def token_ms(self) -> float | None:
        """Milliseconds from one token to the next on average; None before the second one.

        The first token is not counted: it takes as long as reading the prompt.
        """
        if self.tokens < 2:
            return None
        return 1000 * (self._times[-1] - self._times[1]) / (self.tokens - 1)
