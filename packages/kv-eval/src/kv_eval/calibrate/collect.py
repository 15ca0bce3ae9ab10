"""Reading a text for a calibrator: in windows, with what was learnt kept on disk in between."""

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
from kv_policy import Calibrator
from kv_transformers import passing

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel

LEAST_TOKENS: Final = 4096  # fewer leave directions to chance
WINDOW: Final = 2048
EVERY: Final = 2  # windows after which the state is written


@dataclass(frozen=True, slots=True)
class Reading:
    """How much of a text is read, and how."""

    tokens: int = 16384
    window: int | None = None  # None: 2048, or what the model reads if that is less
    together: int = 1  # KV heads whose vectors are looked at side by side

    def __post_init__(self) -> None:
        """Refuse too few tokens.

        Raises:
            ValueError: fewer than 4096 tokens, or a number that is out of range.
        """
        if self.tokens < LEAST_TOKENS:
            raise ValueError(
                f"{self.tokens:,} tokens are too few for a basis that holds for other texts; give "
                f"at least {LEAST_TOKENS:,}"
            )
        if self.window is not None and self.window < 2:
            raise ValueError(f"a window of {self.window} tokens was given; give at least 2")
        if self.together < 1:
            raise ValueError(f"{self.together} heads together were asked for; give at least 1")

    def window_of(self, loaded: "LoadedModel") -> int:
        """Tokens of a window for this model.

        Raises:
            ValueError: more than the model reads.
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
        """Cut the beginning of a text into windows, each begun as the tokenizer begins texts.

        Raises:
            ValueError: the text is too short, or the window longer than the model reads.
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
            f"asked for; give a longer text, or fewer tokens (at least {LEAST_TOKENS:,})"
        )

    def identity(self, loaded: "LoadedModel", text: Text) -> dict[str, object]:
        """Everything that the result depends on."""
        return {
            **subject(loaded, text),
            "tokens": self.tokens,
            "window": self.window_of(loaded),
            "together": self.together,
        }


def collect(
    loaded: "LoadedModel",
    calibrator: Calibrator,
    windows: Sequence[Int[Tensor, "1 L"]],
    partial: Partial,
) -> Iterator[int]:
    """Read the windows that are not read yet; give the tokens read so far, after each.

    Only the model's body runs, without the logits, and nothing of a window is kept.

    Args:
        loaded: the model.
        calibrator: sees every layer's queries, keys and values.
        windows: what there is to read.
        partial: says where to go on, and keeps the state every few windows.

    Raises:
        ValueError: the model is of a kind that cannot be calibrated, or not finite.
    """
    from kv_transformers.collecting import CollectingCache

    cache = CollectingCache(loaded.model, calibrator)
    while partial.windows < len(windows):
        began = time.perf_counter()
        window = windows[partial.windows].to(loaded.model.device)
        with torch.no_grad():
            loaded.model.base_model(
                input_ids=window, **passing(loaded.model.base_model, cache), use_cache=True
            )
        partial.windows += 1
        partial.seconds += time.perf_counter() - began
        if partial.windows % EVERY == 0 or partial.windows == len(windows):
            partial.save(calibrator)
        yield calibrator.tokens
