"""Print text as it is generated, and time it."""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class TimedStreamer:
    """Prints the text of generated tokens on stdout and records their times."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Create a streamer that skips the prompt and special tokens."""
        from transformers import TextStreamer

        self._text: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._times: list[float] = []

    def put(self, value: "Tensor") -> None:
        """Receive the prompt first, then one token per call."""
        self._times.append(time.perf_counter())
        self._text.put(value)

    def end(self) -> None:
        """Print the remaining text."""
        self._text.end()

    @property
    def tokens(self) -> int:
        """Number of tokens generated so far."""
        return max(len(self._times) - 1, 0)

    @property
    def token_ms(self) -> float | None:
        """Mean milliseconds between tokens; None before the second token.

        The first token is excluded, as its time includes the prefill.
        """
        if self.tokens < 2:
            return None
        return 1000 * (self._times[-1] - self._times[1]) / (self.tokens - 1)
