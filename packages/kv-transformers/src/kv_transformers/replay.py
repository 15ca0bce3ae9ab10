"""The second reading of prompts that some policies ask for, by running the model's decoder again.

After the pass over a prompt, the decoder reads an instruction and a chunk of the prompt with a
cache that attends to the waiting prompt and stores nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_policy import KVPolicy, Replay
from kv_runtime import PolicyCache, ReplayChunk
from kv_transformers.cache_argument import passing
from kv_transformers.fresh_layer import AttendingCache
from kv_transformers.pass_columns import PassColumns
from kv_transformers.running import unwinding
from kv_transformers.softmax import Softmax
from kv_transformers.switch import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Arguments: layer, queries, keys, values, softmax. Returns the output of attention for the model.
Attention = Callable[[int, Tensor, Tensor, Tensor, Softmax], Tensor]
# Arguments of a runtime: layer, queries by KV head, keys, values, scale, softcap, sinks.
GroupedAttention = Callable[
    [int, Tensor, Tensor, Tensor, float, float | None, Tensor | None], Tensor
]
# Adds what a cache does around the attention of its runtime, such as packing.
Around = Callable[[GroupedAttention], Attention]


class RereadingCache(AttendingCache):
    """The cache of a pass over a chunk of prompts that were read before; it stores nothing."""

    def __init__(self, model: "PreTrainedModel", attention: Attention) -> None:
        """Bind the cache to a model, with the attention of its passes."""
        super().__init__(model)
        self._attention = attention

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq Lq D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B Hv L Dv"],
        softmax: Softmax,
        columns: PassColumns,
    ) -> Float[Tensor, "B Lq *out"]:
        """Attend over the prompts and the new tokens."""
        return self._attention(layer, query, key, value, softmax)


@dataclass(frozen=True)
class Replayer:
    """Reads prompts again, as a policy asks."""

    replay: Replay
    first: tuple[int, ...]  # token ids of the instructions
    later: tuple[int, ...]

    @classmethod
    def of(
        cls, policy: KVPolicy, replay: Replay | None, tokenizer: "PreTrainedTokenizerBase | None"
    ) -> "Replayer | None":
        """Tokenize the instructions; None: the policy does not ask for a replay.

        Raises:
            ValueError: it does, and there is no tokenizer.
        """
        if replay is None:
            return None
        if tokenizer is None:
            raise ValueError(
                f"{policy} lets the model read each prompt again after an instruction, for which "
                "the tokenizer is needed; pass CompressedCache(model, policy, tokenizer=tokenizer)"
            )
        first, later = (
            tuple(tokenizer.encode(text, add_special_tokens=False))
            for text in (replay.first, replay.later)
        )
        return cls(replay, first, later)

    def run(
        self,
        model: "PreTrainedModel",
        cache: PolicyCache,
        around: Around,
        ids: Int[Tensor, "B L"],
    ) -> None:
        """Read the waiting prompts of a cache again, and let it plan them.

        Args:
            model: the model that has read them.
            cache: a cache whose prompts wait.
            around: applied to the attention of the cache.
            ids: the token ids of the pass, which may hold padding and decoded tokens too.
        """
        now = cache.waiting
        assert now is not None
        decoder = decoder_of(model)
        held = now.position >= 0
        prompts = [row[mine].tolist() for row, mine in zip(ids, held, strict=True)]
        for chunk, given in self._chunks(prompts, now.total.tolist(), ids.device):
            reading = cache.reread(chunk)
            own = RereadingCache(model, around(reading.attend))
            with unwinding():
                decoder(
                    input_ids=given,
                    attention_mask=(chunk.position >= 0).long(),
                    position_ids=chunk.position.clamp(min=0),
                    use_cache=True,
                    **passing(decoder, own),
                )
        cache.replayed()

    def _chunks(
        self, prompts: Sequence[Sequence[int]], ends: Sequence[int], device: torch.device
    ) -> Iterator[tuple[ReplayChunk, Int[Tensor, "B R"]]]:
        """Yield each chunk of the prompts, padded on the right, and the token ids to read.

        Args:
            prompts: the new tokens of each sequence; empty: it has no prompt in this pass.
            ends: tokens of each sequence after the pass.
            device: the device of the results.
        """
        size = self.replay.tokens
        for start in range(0, max(map(len, prompts)), size):
            texts = [self._text(prompt, start) for prompt in prompts]
            width = max(map(len, texts))
            ids = [[*text, *[0] * (width - len(text))] for text in texts]
            position = [
                [*range(end, end + len(text)), *[-1] * (width - len(text))]
                for text, end in zip(texts, ends, strict=True)
            ]
            before = [end - len(prompt) for prompt, end in zip(prompts, ends, strict=True)]
            first = [n + min(start, len(p)) for n, p in zip(before, prompts, strict=True)]
            past = [n + min(start + size, len(p)) for n, p in zip(before, prompts, strict=True)]
            each = (torch.tensor(x, device=device) for x in (position, first, past))
            yield ReplayChunk(*each), torch.tensor(ids, device=device)

    def _text(self, prompt: Sequence[int], start: int) -> list[int]:
        """Return an instruction and the chunk of a prompt that begins at `start`; empty: none."""
        chunk = prompt[start : start + self.replay.tokens]
        if not chunk:
            return []
        if not start:
            return [*self.first, *chunk]
        return [*self.later, *prompt[start - self.replay.quoted : start], *chunk]
