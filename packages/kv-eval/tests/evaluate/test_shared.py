"""A prompt read once for several caches leaves each as if it had read the prompt alone."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache

from kv_eval.evaluate import shared
from kv_eval.evaluate.decode import read
from kv_eval.evaluate.shared import read_prompt
from kv_policy import Budget, Evictor, LayerView, Observe, Raw
from kv_transformers import CompressedCache
from kv_transformers.models import LoadedModel


@dataclass(frozen=True)
class Heavy(Evictor):
    """Keeps the tokens that the last queries attended to most."""

    name: ClassVar[str] = "heavy"
    last: int = 8

    @property
    def observe(self) -> Observe:
        return Observe(last=self.last)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        assert view.mass is not None
        return view.mass


def caches(model) -> list[Cache]:
    policies = [
        Raw(),
        Heavy(Budget(10)),
        Heavy(Budget(20)),
        Heavy(Budget(10), last=3),
        Heavy(Budget(50, "percent")),
    ]
    return [DynamicCache(config=model.config), *(CompressedCache(model, p) for p in policies)]


def bytes_of(cache: Cache) -> Tensor:
    if isinstance(cache, CompressedCache):
        batch = cache.runtime.batch
        assert batch is not None
        return batch.pool.data[batch.tiers.pages()].flatten()
    return torch.cat([t.flatten() for layer in cache.layers for t in (layer.keys, layer.values)])


def test_each_cache_is_as_if_it_were_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded.model
    prompt = torch.randint(4, 90, (2, 40))
    passes = []

    def counted(*arguments):
        passes.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(shared, "read", counted)
    together, alone = caches(model), caches(model)
    read_prompt(model, together, prompt)
    assert len(passes) == 2  # transformers' own, and one for all that are compressed
    for a, b in zip(together, alone, strict=True):
        read(model, b, prompt)
        assert torch.equal(bytes_of(a), bytes_of(b))
        for token in (torch.tensor([[7], [9]]), torch.tensor([[12], [40]])):
            assert torch.equal(read(model, a, token), read(model, b, token))
        if isinstance(a, CompressedCache):
            assert a.memory().tokens.tolist() == b.memory().tokens.tolist()


def test_a_cache_that_leads_once_does_not_lead_again(loaded: LoadedModel) -> None:
    model = loaded.model
    leader, other = CompressedCache(model, Raw()), CompressedCache(model, Raw())
    read_prompt(model, [leader, other], torch.randint(4, 90, (1, 12)))
    read(model, leader, torch.tensor([[7]]))
    assert (leader.get_seq_length(), other.get_seq_length()) == (13, 12)
