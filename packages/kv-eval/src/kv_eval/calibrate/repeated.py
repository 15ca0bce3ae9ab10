"""Windows that hold a text twice, with the request to repeat it between: KVzip's reconstruction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Int
from torch import Tensor

from kv_eval.calibrate.passages import Passage
from kv_eval.evaluate.provenance import model_identity

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel

INSTRUCTION: Final = "\n\nRepeat the previous context exactly.\n\n"
LEAST_TOKENS: Final = 4096  # with fewer, most of the features' correlations are noise
WINDOW: Final = 900  # tokens repeated at once


@dataclass(frozen=True, slots=True)
class Repetitions:
    """How much of each text is read, and in which windows."""

    tokens: int = 27_000
    window: int | None = None  # tokens repeated at once; None: 900, or half of the model's context

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: too few tokens, or a window that is too short.
        """
        if self.tokens < LEAST_TOKENS:
            raise ValueError(
                f"{self.tokens:,} tokens are too few for a gate that holds for other texts; use at "
                f"least {LEAST_TOKENS:,}"
            )
        if self.window is not None and self.window < 64:
            raise ValueError(f"a window of {self.window} tokens was given; use at least 64")

    def instruction(self, loaded: "LoadedModel") -> list[int]:
        """Return the tokens between a text and its repetition."""
        found: list[int] = loaded.tokenizer.encode(INSTRUCTION, add_special_tokens=False)
        return found

    def window_of(self, loaded: "LoadedModel") -> int:
        """Return the tokens repeated at once by this model.

        Raises:
            ValueError: the model's context is too short for the window twice.
        """
        limit = getattr(loaded.model.config, "max_position_embeddings", None)
        room = None if limit is None else (limit - len(self.instruction(loaded))) // 2
        if self.window is None:
            return WINDOW if room is None else min(WINDOW, room)
        if room is not None and self.window > room:
            raise ValueError(
                f"a window of {self.window:,} tokens was given; {loaded.name} has room for "
                f"{room:,} tokens and their repetition"
            )
        return self.window

    def windows(
        self, loaded: "LoadedModel", passages: Sequence[Passage]
    ) -> tuple[tuple[Int[Tensor, "1 L"], ...], dict[str, Int[Tensor, "1 L"]]]:
        """Cut windows from all texts in turn, and one more from the end of each, by its name.

        Raises:
            ValueError: two texts have one name, a text is too short, or the window does not fit
                the model.
        """
        names = [passage.name for passage in passages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"{names.count(name)} texts are named {name}; give each file a name of its own"
                )
        size = self.window_of(loaded)
        each = -(-self.tokens // (size * len(passages)))
        cut = [self._cut(loaded, passage, size, each + 1) for passage in passages]
        in_turn = tuple(windows[i] for i in range(each) for windows in cut)
        return in_turn, {p.name: windows[-1] for p, windows in zip(passages, cut, strict=True)}

    def _cut(
        self, loaded: "LoadedModel", passage: Passage, size: int, count: int
    ) -> list[Int[Tensor, "1 L"]]:
        """Cut windows from evenly spread places of a text."""
        ids = loaded.tokenizer.encode(passage.body, add_special_tokens=False, verbose=False)
        if len(ids) < size * count:
            raise ValueError(
                f"the text {passage.name} has {len(ids):,} tokens, and {size * count:,} are needed "
                f"of each of the texts; use longer texts, or fewer tokens (at least "
                f"{LEAST_TOKENS:,})"
            )
        step, middle = len(ids) // count, self.instruction(loaded)
        texts = [ids[i * step : i * step + size] for i in range(count)]
        return [torch.tensor([[*text, *middle, *text]]) for text in texts]

    def identity(self, loaded: "LoadedModel", passages: Sequence[Passage]) -> dict[str, object]:
        """Return everything that the result depends on."""
        return {
            **model_identity(loaded),
            "texts": [f"{p.name} {p.digest}" for p in passages],
            "tokens": self.tokens,
            "window": self.window_of(loaded),
            "instruction": INSTRUCTION,
        }
