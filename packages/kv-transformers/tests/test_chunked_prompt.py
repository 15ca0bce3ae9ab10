"""A prompt that a caller passes in many parts takes the pages of its budget, and no more."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kv_evict.gate_features import width
from kv_evict.gate_file import Facts, GateWeights, save
from kv_evict.gate_network import GateNetwork
from kv_paging import PagePool, PoolExhausted
from kv_runtime import Account
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.fitted import fingerprint_of

CHUNKS, CHUNK = 40, 12
POISONED = partial(PagePool, poison=True)  # free pages are NaN


def read(model: torch.nn.Module, cache: CompressedCache, ids: torch.Tensor) -> list[int]:
    """Pass a prompt in parts; return the pages in use after each."""
    used = []
    for part in ids.split(CHUNK, 1):
        logits = model(part, **passing(model, cache)).logits
        assert logits.isfinite().all()
        used.append(cache.runtime.batch.pool.used)
    return used


@pytest.mark.parametrize(
    "policy",
    [
        "streaming:budget=24,chunks=true",
        "streaming:budget=24,chunks=true+k8v4:window=8",
        "streaming:budget=24",
    ],
)
@torch.no_grad()
def test_forty_chunks_take_the_pages_of_the_budget(make, monkeypatch, policy) -> None:
    monkeypatch.setattr("kv_runtime.batch.PagePool", POISONED)
    model, most = make(), 3 * 2 * 24 // 4  # every head keeps 24 tokens, in pages of four
    ids = torch.randint(3, 101, (1, CHUNKS * CHUNK), generator=torch.Generator().manual_seed(0))
    cache = CompressedCache(model, policy, page_tokens=4, pages=most)
    assert set(read(model, cache, ids)[3:]) == {most}
    for _ in range(20):
        model(ids[:, :1], **passing(model, cache))
        assert cache.runtime.batch.pool.used == most
    with pytest.raises(PoolExhausted):
        read(model, CompressedCache(model, policy, page_tokens=4, pages=most - 1), ids)


def write_gate(path: Path, fingerprint: str) -> None:
    """Write a gate of random weights for the tiny model, and its heads of eight dimensions."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(3, 2, *shape, generator=draw) * 0.05

    count = width(8, 8)
    network = GateNetwork(drawn(count), drawn(count, 4), drawn(4)).halves()
    sizes = {"layers": 3, "heads": 2, "key_dim": 8, "value_dim": 8, "units": 4, "window": 10}
    facts = Facts(
        model="tiny",
        fingerprint=fingerprint,
        text="none",
        digest="0",
        tokens=9,
        overlap={},
        **sizes,
    )
    save(path, GateWeights(facts, network, torch.linspace(0, 1, 11)))


@torch.no_grad()
def test_a_gate_takes_the_pages_of_its_budget_however_heads_share_it(
    make, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr("kv_runtime.batch.PagePool", POISONED)
    make().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    write_gate(tmp_path / "gate", str(fingerprint_of(model)))
    policy = f"gate:file={tmp_path / 'gate'},budget=24,chunks=true+k8v4:window=8"
    most = 3 * 2 * 24 // 4 + 3 * 2 * 3 // 4  # of each head, a token may open another page
    cache = CompressedCache(model, policy, page_tokens=4, pages=most)
    account = Account.of(cache.runtime.layout, 4)
    assert account.planned(10**6, 24, 0) - account.window_pages == most
    ids = torch.randint(3, 101, (1, CHUNKS * CHUNK), generator=torch.Generator().manual_seed(0))
    used = read(model, cache, ids)
    tokens = cache.memory().tokens
    assert 3 * 2 * 24 - 4 < int(tokens.sum()) - 3 * 2 * 8 <= 3 * 2 * 24
    assert int(tokens.max()) > int(tokens.min())
    assert max(used) <= most
