"""A row of a batch keeps the same tokens as alone, under every installed selector."""

import pytest
import torch

from kv_policy import Registry, parse
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from letters import Letters

OWN = {
    "kv-compress": "recent=4,window=4",
    "leankv": "low=drop,t_high=0.5,window=4",
    "scissorhands": "recent=2",
    "streaming": "sinks=2",
    "lagkv": "sinks=1,lag=3",
    "simlayerkv": "threshold=0.3,sinks=1,recent=4",
}


def selectors() -> list[str]:
    """Yield every selector that needs no file, with a budget and a window below the prompts."""
    registry, found = Registry.scan(), []
    for name in registry.claims:
        part = registry.load(name)
        known = {parameter.name for parameter in part.parameters()}
        if "file" in known or parse(name).selector is None:
            continue
        window = "window=4" if "window" in known and name not in OWN else ""
        options = ("budget=14" if "budget" in known else "", OWN.get(name, ""), window)
        found.append(f"{name}:{','.join(filter(None, options))}".rstrip(":"))
    return found


def kept(cache: CompressedCache) -> list[list[tuple[int, int]]]:
    """Return the positions and tiers of each layer, sequence and head."""
    batch = cache.runtime.batch
    found: list[list[tuple[int, int]]] = [[] for _ in range(batch.stores[0].length.numel())]
    for tier, store in zip(batch.tiers.tier, batch.stores, strict=True):
        read = store.read(store.table_rows())
        for row, place in zip(found, read.position.masked_fill(~read.held, -1), strict=True):
            row += [(p, tier) for p in place.tolist() if p >= 0]
    return [sorted(row) for row in found]


# Prompts so short that many tokens share a pooling window, and with repeated tokens, whose keys
# have equal norms: scores are equal up to rounding, which differs between a batch and a row.
@pytest.mark.parametrize("policy", selectors())
@torch.no_grad()
def test_a_batch_keeps_what_each_row_keeps_alone(make, policy: str) -> None:
    model, draw = make(), torch.Generator().manual_seed(7)
    lengths = torch.randint(6, 60, (3,), generator=draw)
    width = int(lengths.max())
    ids = torch.randint(3, 101, (3, width), generator=draw)
    mask = (torch.arange(width)[None] >= width - lengths[:, None]).long()
    steps = torch.randint(3, 101, (3, 6), generator=draw)
    together = CompressedCache(model, policy, page_tokens=4, tokenizer=Letters())
    # Keys rotated by a row's own positions, as in a single row: lagkv reads their channels.
    own = (mask.cumsum(1) - 1).clamp(min=0)
    model(ids * mask, attention_mask=mask, position_ids=own, **passing(model, together))
    for step in steps[:, :2].split(1, dim=1):
        mask = torch.cat([mask, torch.ones_like(step)], 1)
        own = mask.sum(1, keepdim=True) - 1
        model(step, attention_mask=mask, position_ids=own, **passing(model, together))
    rows = torch.arange(18).view(3, 3, 2)  # layer, sequence, head
    found = kept(together)
    for b, length in enumerate(lengths.tolist()):
        alone = CompressedCache(model, policy, page_tokens=4, tokenizer=Letters())
        model(ids[b : b + 1, width - length :], **passing(model, alone))
        for step in steps[b : b + 1, :2].split(1, dim=1):
            model(step, **passing(model, alone))
        assert [found[i] for i in rows[:, b].flatten()] == kept(alone)
