"""Windows of random tokens that repeat, on which heads that retrieve show what they do."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Int
from torch import Tensor

from kv_eval.evaluate.provenance import model_identity
from kv_eval.tasks.windows import text_start

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel

PERIOD: Final = 512
LEAST_PERIOD: Final = 16  # with fewer, the previous period is among the first tokens
REPEATS: Final = 4  # periods of a window, as in RazorAttention


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """How many tokens are drawn, and how often they repeat.

    Attributes:
        period: tokens drawn for a window; None: 512, or what fits the model's context.
        windows: windows, each of its own tokens.
        seed: of the tokens.
    """

    period: int | None = None
    windows: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: a period that is too short, or no window.
        """
        if self.period is not None and self.period < LEAST_PERIOD:
            raise ValueError(
                f"a period of {self.period} tokens was given; use at least {LEAST_PERIOD}"
            )
        if self.windows < 1:
            raise ValueError(f"{self.windows} windows were requested; use at least 1")

    @property
    def name(self) -> str:
        """How the tokens were drawn, in words."""
        return f"random tokens, repeated {REPEATS} times, seed {self.seed}"

    def period_of(self, loaded: "LoadedModel") -> int:
        """Return the tokens that are drawn for a window of this model.

        Raises:
            ValueError: the model's context is too short for them.
        """
        limit = getattr(loaded.model.config, "max_position_embeddings", None)
        room = None if limit is None else (limit - len(text_start(loaded.tokenizer))) // REPEATS
        period = self.period or (PERIOD if room is None else min(PERIOD, room))
        if room is not None and not LEAST_PERIOD <= period <= room:
            raise ValueError(
                f"a period of {period:,} tokens is too long or too short; {loaded.name} has room "
                f"for {REPEATS} of {LEAST_PERIOD} to {room:,} tokens"
            )
        return period

    def drawn(self, loaded: "LoadedModel") -> tuple[Int[Tensor, "1 L"], ...]:
        """Return the windows: the tokenizer's prefix tokens, then the periods.

        Special tokens are left out, and no token occurs twice in a period if there are enough.

        Raises:
            ValueError: the model's context is too short.
        """
        special = set(loaded.tokenizer.all_special_ids)
        vocabulary = loaded.model.config.get_text_config(decoder=True).vocab_size
        known = min(len(loaded.tokenizer), vocabulary)
        usable = torch.tensor([i for i in range(known) if i not in special])
        start = torch.tensor(text_start(loaded.tokenizer), dtype=torch.long)
        period, draw = self.period_of(loaded), torch.Generator().manual_seed(self.seed)
        rounds = -(-period // len(usable))
        found = []
        for _ in range(self.windows):
            each = [torch.randperm(len(usable), generator=draw) for _ in range(rounds)]
            tokens = usable[torch.cat(each)[:period]]
            found.append(torch.cat([start, tokens.repeat(REPEATS)])[None])
        return tuple(found)

    def identity(self, loaded: "LoadedModel") -> dict[str, object]:
        """Return everything that the result depends on."""
        return {
            **model_identity(loaded),
            "text": self.name,
            "period": self.period_of(loaded),
            "windows": self.windows,
        }


def digest(windows: tuple[Int[Tensor, "1 L"], ...]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the tokens."""
    text = " ".join(str(i) for window in windows for i in window[0].tolist())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
