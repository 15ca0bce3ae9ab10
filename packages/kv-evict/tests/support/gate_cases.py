"""Random gates and tokens, and their scores in float64."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kv_evict.gate_features import width
from kv_evict.gate_file import Facts, GateWeights
from kv_evict.gate_network import GateNetwork
from kv_policy import CacheShape, LayerView, Rope, Ropes


def rope_of(dim: int, kind: str = "halves") -> Rope:
    """Return a rotary embedding: halves, neighbours, a part of the dimensions, or none."""
    if kind == "none":
        return Rope(())
    rotated = dim // 2 if kind.startswith("part") else dim
    half = rotated // 2
    frequencies = tuple(1e4 ** (-2 * i / max(rotated, 1)) for i in range(half))
    if kind == "halves":
        return Rope(frequencies)
    if kind == "neighbours":
        return Rope(frequencies, tuple((2 * i, 2 * i + 1) for i in range(half)))
    if kind == "part":
        return Rope(frequencies, tuple((i, i + half) for i in range(half)))
    assert kind == "part of halves"
    return Rope(frequencies)


def gate_of(shape: CacheShape, units: int, heads: int | None = None, seed: int = 0) -> GateWeights:
    """Return a gate with random weights for so many heads."""
    g = torch.Generator().manual_seed(seed)
    heads = heads or shape.kv_heads
    lead, count = (shape.layers, heads), width(shape.key_dim, shape.value_dim)
    facts = Facts(
        model="",
        fingerprint="",
        text="",
        digest="",
        tokens=1,
        window=1,
        layers=shape.layers,
        heads=heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        units=units,
        overlap={},
    )
    scale = count**-0.5
    network = GateNetwork(
        torch.randn(*lead, count, generator=g) * scale,
        torch.randn(*lead, count, units, generator=g) * scale,
        torch.randn(*lead, units, generator=g) * 0.3,
    )
    return GateWeights(facts, network.halves(), torch.linspace(0, 1, 11))


def view_of(
    shape: CacheShape,
    layers: Sequence[int],
    tokens: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    most: int = 5000,
) -> LayerView:
    """Return tokens of layers at random positions, the same for all heads, some of them empty."""
    g = torch.Generator().manual_seed(seed)
    lead = (len(layers), shape.kv_heads, tokens)
    place = torch.randint(-1, most, (len(layers), 1, tokens), generator=g).expand(lead)
    key, value = (
        torch.randn(*lead, dim, generator=g).to(dtype) for dim in (shape.key_dim, shape.value_dim)
    )
    return LayerView(
        layer=torch.tensor(list(layers), dtype=torch.long),
        shape=shape,
        position=place,
        fresh=place >= 0,
        score=torch.zeros(lead),
        length=torch.full((len(layers),), most),
        keys=key,
        values=value,
    )


def of_model(view: LayerView, first: int, heads: int) -> LayerView:
    """Return a shard of a view: some of its heads."""
    some = slice(first, first + heads)
    assert view.keys is not None
    assert view.values is not None
    return replace(
        view,
        shape=replace(view.shape, kv_heads=heads, first_head=view.shape.first_head + first),
        position=view.position[:, some],
        fresh=view.fresh[:, some],
        score=view.score[:, some],
        keys=view.keys[:, some],
        values=view.values[:, some],
    )


def exact(gate: GateWeights, view: LayerView) -> Tensor:
    """Return the logarithms of scores in float64; angles are rounded to float32, as they are."""
    assert view.keys is not None
    assert view.values is not None
    found = torch.zeros(view.position.shape, dtype=torch.float64)
    for b, layer in enumerate(view.layer.tolist()):
        rope = view.shape.rope
        rope = rope.each[layer] if isinstance(rope, Ropes) else rope
        assert rope is not None
        key, value = view.keys[b].double(), view.values[b].double()
        dim = key.shape[-1]
        pairs = rope.pairs
        if pairs is None:
            pairs = tuple((i, i + dim // 2) for i in range(len(rope.frequencies)))
        place = view.position[b].clamp(min=0).float()
        plain, norm = key.clone(), key.abs() * 2**0.5
        for (i, j), frequency in zip(pairs, rope.frequencies, strict=True):
            angle = (place * torch.tensor(frequency, dtype=torch.float32)).double()
            plain[..., i] = key[..., i] * angle.cos() + key[..., j] * angle.sin()
            plain[..., j] = key[..., j] * angle.cos() - key[..., i] * angle.sin()
            norm[..., i] = norm[..., j] = torch.hypot(key[..., i], key[..., j])
        norms = torch.stack([x.norm(dim=-1) for x in (plain, value)], -1)
        rest = norms, (norms + 1e-6).log(), torch.ones_like(norms[..., :1])
        features = torch.cat((plain, value, norm, *rest), -1)
        heads = slice(view.shape.first_head, view.shape.first_head + len(key))
        network = gate.network
        each = (x[layer, heads].double() for x in (network.linear, network.inner, network.outer))
        linear, inner, outer = each
        hidden = (features @ inner).relu() @ outer[..., None]
        found[b] = (features @ linear[..., None] + hidden)[..., 0]
    return found
