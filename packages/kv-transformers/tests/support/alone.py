"""Compare a padded batch with each of its rows alone and unpadded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing

# One policy of each kind of storage, inputs, planning and decode step.
POLICIES: Final = (
    "raw",
    "k4v2:window=4",
    "k8v4:keys=channel",
    "streaming:budget=8,sinks=2",
    "snapkv:budget=10,window=4+k8v4",
    "kv-compress:budget=10,window=4,recent=4,every=3",
    "leankv:high=raw,low=raw,t_high=0.3,window=4",
    "h2o:budget=8+k8v4:window=3",
    "keyformer:budget=8",
    "fastgen:recovery=0.5,sinks=1,window=8",
    "cake:budget=10,window=4,pool=3",
    "keydiff:budget=8",
    "r-kv:budget=10,window=4,pool=3,every=3",
    "d2o:budget=10,every=3",
    "cam:budget=10,targets=3,every=3",
    "snapkv:budget=10,window=4+kvmerger+k8v4",
    "lagkv:budget=8,sinks=1,lag=3",
    "expected-attention:budget=10",
)


def sharp_model() -> PreTrainedModel:
    """Create a tiny Llama in float64 with non-uniform attention."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    return model


def left(*lengths: int) -> Tensor:
    """Return the mask of prompts of the given lengths, padded on the left."""
    width = max(lengths)
    return torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]


def right(*lengths: int) -> Tensor:
    """Return the mask of turns of the given lengths, padded on the right."""
    return left(*lengths).flip(1)


def steps(count: int, rows: int) -> list[Tensor]:
    """Return the masks of generated tokens, one pass each."""
    return [torch.ones(rows, 1, dtype=torch.bool)] * count


@dataclass(frozen=True)
class Reader:
    """Runs passes on caches of one model and policy."""

    model: PreTrainedModel
    policy: str

    def cache(self) -> CompressedCache:
        """Create an empty cache with small pages."""
        return CompressedCache(self.model, self.policy, page_tokens=4, backend="torch")

    def read(
        self, cache: CompressedCache, ids: Tensor, mask: Tensor, start: int, end: int
    ) -> Tensor:
        """Run the model on the columns from start to end; return the logits."""
        place = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return self.model(
            ids[:, start:end],
            attention_mask=mask[:, :end].long(),
            position_ids=place[:, start:end],
            **passing(self.model, cache),
        ).logits

    def expect_alone(self, passes: Sequence[Tensor], seed: int = 1) -> CompressedCache:
        """Compare a batch with its rows alone, pass by pass; return the batch's cache."""
        mask = torch.cat(list(passes), 1)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 101, mask.shape, generator=generator)
        cache, alone = self.cache(), [self.cache() for _ in mask]
        start = 0
        for valid in passes:
            end = start + valid.shape[1]
            got = self.read(cache, ids, mask, start, end)
            for row, one in enumerate(alone):
                mine = valid[row]
                if not mine.any():
                    continue
                fresh = ids[row, start:end][mine][None]
                want = self.model(fresh, **passing(self.model, one)).logits
                torch.testing.assert_close(got[row : row + 1, mine], want, rtol=1e-8, atol=1e-8)
            start = end
        tokens = cache.memory().tokens
        for row, one in enumerate(alone):
            assert torch.equal(tokens[:, row], one.memory().tokens[:, 0])
        return cache
