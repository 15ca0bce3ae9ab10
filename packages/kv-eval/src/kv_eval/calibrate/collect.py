"""Collecting a calibrator's statistics from a text in windows, with checkpoints on disk."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Int
from torch import Tensor

from kv_eval.calibrate.partial import Partial
from kv_eval.evaluate.provenance import subject
from kv_eval.tasks import Text
from kv_eval.tasks.windows import text_start
from kv_policy import Collector, Resumable
from kv_transformers import passing

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel

LEAST_TOKENS: Final = 4096  # with fewer, directions are random
WINDOW: Final = 2048


@dataclass(frozen=True, slots=True)
class Reading:
    """How much of a text is read, and in which windows."""

    tokens: int = 16384
    window: int | None = None  # None: 2048, or the model's context length if smaller
    together: int = 1  # KV heads whose vectors are concatenated

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: fewer than 4096 tokens, or a number that is out of range.
        """
        if self.tokens < LEAST_TOKENS:
            raise ValueError(
                f"{self.tokens:,} tokens are too few for a basis that holds for other texts; use "
                f"at least {LEAST_TOKENS:,}"
            )
        if self.window is not None and self.window < 2:
            raise ValueError(f"a window of {self.window} tokens was given; use at least 2")
        if self.together < 1:
            raise ValueError(f"{self.together} heads together were requested; use at least 1")

    def window_of(self, loaded: "LoadedModel") -> int:
        """Return the tokens per window for this model.

        Raises:
            ValueError: the window exceeds the model's context length.
        """
        limit = getattr(loaded.model.config, "max_position_embeddings", None)
        if self.window is None:
            return WINDOW if limit is None else min(WINDOW, limit)
        if limit is not None and self.window > limit:
            raise ValueError(
                f"a window of {self.window:,} tokens was given; {loaded.name} reads {limit:,}"
            )
        return self.window

    def windows(self, loaded: "LoadedModel", text: Text) -> tuple[Int[Tensor, "1 L"], ...]:
        """Split the beginning of a text into windows, each with the tokenizer's prefix tokens.

        Raises:
            ValueError: the text is too short, or the window exceeds the model's context length.
        """
        start = text_start(loaded.tokenizer)
        size = self.window_of(loaded) - len(start)
        ids = loaded.tokenizer.encode(text.body, add_special_tokens=False, verbose=False)
        room, found = self.tokens, []
        for begin in range(0, len(ids), size):
            window = [*start, *ids[begin : begin + size]][:room]
            room -= len(window)
            found.append(torch.tensor([window]))
            if room == 0:
                return tuple(found)
        raise ValueError(
            f"the text {text.name} has {self.tokens - room:,} tokens and {self.tokens:,} were "
            f"requested; use a longer text, or fewer tokens (at least {LEAST_TOKENS:,})"
        )

    def identity(self, loaded: "LoadedModel", text: Text) -> dict[str, object]:
        """Return everything that the result depends on."""
        return {
            **subject(loaded, text),
            "tokens": self.tokens,
            "window": self.window_of(loaded),
            "together": self.together,
        }


def collect(
    loaded: "LoadedModel",
    calibrator: Resumable,
    windows: Sequence[Int[Tensor, "1 L"]],
    partial: Partial,
    every: int,
) -> Iterator[int]:
    """Read the remaining windows; yield the tokens accumulated so far after each.

    Only the model's body runs, without the logits, and no window is kept in memory.

    Args:
        loaded: the model.
        calibrator: receives every layer's queries, keys and values.
        windows: all windows.
        partial: holds the position to resume from, and saves the state.
        every: windows between two checkpoints.

    Raises:
        ValueError: the model cannot be calibrated, or its vectors are not finite.
    """
    while partial.windows < len(windows):
        began = time.perf_counter()
        show(loaded, calibrator, windows[partial.windows])
        partial.windows += 1
        partial.seconds += time.perf_counter() - began
        if partial.windows % every == 0 or partial.windows == len(windows):
            partial.save(calibrator)
        yield calibrator.tokens


def show(loaded: "LoadedModel", collector: Collector, window: Int[Tensor, "1 L"]) -> None:
    """Run the model's body over a window, and pass every layer's vectors to the collector."""
    from kv_transformers.collecting import CollectingCache

    body = loaded.model.base_model
    cache = CollectingCache(loaded.model, collector)
    with torch.no_grad():
        body(input_ids=window.to(loaded.model.device), **passing(body, cache), use_cache=True)
