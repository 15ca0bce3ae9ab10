"""Methods that merge, on a real model: the vectors in pages are those of a loop over its tokens."""

import math

import pytest
import torch
from torch import Tensor

from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.models import LoadedModel, load_model

TEXT = "The lighthouse keeper wrote down every ship that passed, and the number on its side. "


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(device="cpu")


def read(loaded: LoadedModel, policy: str, text: str = 12 * TEXT) -> CompressedCache:
    """Return a cache that has read a text."""
    cache = CompressedCache(loaded.model, policy)
    ids = torch.tensor([loaded.tokenizer.encode(text)])
    with torch.no_grad():
        loaded.model(ids, **passing(loaded.model, cache))
    return cache


def row(cache: CompressedCache, index: int) -> tuple[list[int], Tensor, Tensor]:
    """Return positions, keys and values of a head of a layer."""
    batch = cache.runtime.batch
    assert batch is not None
    (store,) = batch.stores
    found = store.read(store.table_rows()[index : index + 1], frozenset({"keys", "values"}))
    assert found.position is not None
    held = found.held[0]
    order = found.position[0][held].argsort()
    vectors = (x[0][held][order].double() for x in (found.key, found.value))
    return found.position[0][held][order].tolist(), *vectors


@pytest.mark.model
@torch.no_grad()
@pytest.mark.parametrize("rows", [(0, 1, 2), (40, 89)])
def test_d2o_stores_what_a_loop_merges(loaded: LoadedModel, rows: tuple[int, ...]) -> None:
    merged = read(loaded, "d2o:budget=64,every=0+fp32")
    whole = read(loaded, "d2o:budget=4096,every=0+fp32")
    for index in rows:
        kept, *found = row(merged, index)
        every, keys, values = row(whole, index)
        assert (len(kept), every) == (64, list(range(len(every))))
        gone = [p for p in every if p not in set(kept)]
        cosines = torch.cosine_similarity(keys[gone][:, None], keys[kept], dim=-1)
        largest, place = cosines.max(-1)
        weights = {j: {j: math.e} for j in kept}
        for i, u, at in zip(gone, largest.tolist(), place.tolist(), strict=True):
            if u >= float(largest.mean()):
                weights[kept[at]][i] = math.exp(u)
        assert sum(map(len, weights.values())) > 70
        for x, old in zip(found, (keys, values), strict=True):
            right = torch.stack(
                [
                    sum((w * old[i] for i, w in mine.items()), torch.zeros(old.shape[-1]))
                    / sum(mine.values())
                    for mine in weights.values()
                ]
            )
            torch.testing.assert_close(x, right, rtol=8e-3, atol=1e-3)  # bfloat16


@pytest.mark.model
@torch.no_grad()
def test_cam_keeps_keys_and_adds_values(loaded: LoadedModel) -> None:
    merged = read(loaded, "cam:budget=64,every=0,targets=4+fp32")
    whole = read(loaded, "cam:budget=4096,every=0+fp32")
    for index in (0, 41, 89):
        kept, key, value = row(merged, index)
        _, keys, values = row(whole, index)
        torch.testing.assert_close(key, keys[kept], rtol=1e-5, atol=1e-5)
        assert float((value - values[kept]).norm() / values[kept].norm()) > 0.01


@pytest.mark.model
@torch.no_grad()
@pytest.mark.parametrize(("policy", "plans"), [("cam:every=8", 3), ("d2o+snapkv:window=8", 1)])
def test_a_model_goes_on_from_merged_tokens(loaded: LoadedModel, policy: str, plans: int) -> None:
    cache = CompressedCache(loaded.model, f"{policy},budget=64+k8v4")
    ids = torch.tensor([loaded.tokenizer.encode(6 * TEXT)])
    out = loaded.model.generate(
        ids, **passing(loaded.model, cache), max_new_tokens=20, min_new_tokens=20, do_sample=False
    )
    assert out.shape[1] == ids.shape[1] + 20
    batch = cache.runtime.batch
    assert batch is not None
    assert cache.runtime.tally.plans == plans
    assert int(batch.tiers.counts().max()) == 64 + 19 - 8 * (plans - 1)
    batch.pool.check(batch.pages())
