"""Layers of prompts that enter pages together hold what each holds alone, but for rounding."""

import weakref
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kv_policy import KVPolicy, LayerView, compose, parse
from kv_runtime.cache import PolicyCache
from kv_runtime.retain import selected
from tiered_policies import POLICIES, SHAPE, Turned

ALSO = {
    "leankv-codes": parse("leankv:high=k8v4,low=k4v2,window=5"),
    "leankv-ranks": compose(parse("leankv:high=raw,low=raw,window=3"), Turned("622256", "133341")),
    "snapkv-codes-window": parse("snapkv:budget=12,window=8,pool=3+k8v4:window=5"),
    "cam": parse("cam:budget=12+k8v4"),
}
ENDS = (20, 45, 60)


def states(policy: KVPolicy, together: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Read a prompt in chunks, generate, and read another; a state and all that was attended to."""
    monkeypatch.setattr(selected, "_STORED_TOGETHER", together)
    draw = torch.Generator().manual_seed(3)
    cache = PolicyCache(policy, SHAPE, page_tokens=4)

    def passed(tokens: int, *, prompt: bool, remaining: int = 0) -> None:
        cache.begin(torch.ones(2, tokens, dtype=torch.bool), prompt=prompt, remaining=remaining)
        for layer in range(SHAPE.layers):
            lead = 2, SHAPE.kv_heads
            query = torch.randn(*lead, SHAPE.group, tokens, SHAPE.key_dim, generator=draw)
            key = torch.randn(*lead, tokens, SHAPE.key_dim, generator=draw)
            value = torch.randn(*lead, tokens, SHAPE.value_dim, generator=draw)
            outs.append(cache.attend(layer, query, key, value, 0.4))

    outs: list[Tensor] = []
    for _ in range(2):
        for first, end in pairwise((0, *ENDS)):
            passed(end - first, prompt=True, remaining=ENDS[-1] - end)
        for _ in range(7):
            passed(1, prompt=False)
    found = dict(cache.state().tensors)
    return found | {f"attention {i}": out for i, out in enumerate(outs)}


@pytest.mark.parametrize("name", [*POLICIES, *ALSO])
def test_layers_that_enter_pages_together_are_as_those_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = (POLICIES | ALSO)[name]
    wanted = states(policy, 1, monkeypatch)
    two_layers = 2 * 2 * SHAPE.kv_heads * 15  # of chunks of 15 tokens or more
    for together in (1 << 18, *([two_layers] if name in ALSO else [])):
        found = states(policy, together, monkeypatch)
        assert found.keys() == wanted.keys()
        for part, x in found.items():
            close = {"equal_nan": True, "rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(x, wanted[part], **close, msg=f"{name}: {part} differs")


@pytest.mark.parametrize(
    ("spec", "together"),
    [
        ("kv-compress:budget=12,floor=8,window=4,recent=4+k8v4:window=3", True),
        ("prefixkv:budget=12,window=4+k8v4:window=3", True),
        ("snapkv:budget=12,window=4+k8v4:window=3", True),  # its layers are planned one by one
        ("leankv:window=3", True),
        ("cake:budget=12,window=4+k8v4:window=3", True),
        ("streaming:budget=12+k8v4:window=3", False),  # nothing is observed
        ("knorm:budget=12+k8v4:window=3", False),  # keys are read
    ],
)
def test_observed_prompts_of_several_layers_are_scored_in_one_call(
    spec: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, asked = parse(spec), []
    assert policy.selector is not None
    kind = type(policy.selector)
    score = kind.score

    def noted(me: object, view: LayerView) -> Tensor:
        asked.append((int(view.length[0]), view.layer.unique().tolist()))
        return score(me, view)

    def scored(tokens: int) -> tuple[dict[str, Tensor], list[list[int]]]:
        asked.clear()
        monkeypatch.setattr(selected, "_TOGETHER", tokens)
        found = states(policy, 1 << 16, monkeypatch)
        return found, [layers for length, layers in asked if length == ENDS[-1]]

    monkeypatch.setattr(kind, "score", noted)
    every = [*range(SHAPE.layers)]
    wanted, alone = scored(1)
    found, all_layers = scored(1 << 18)
    assert alone == [[layer] for layer in every]
    assert all_layers == ([every] if together else alone)
    for part, x in found.items():
        torch.testing.assert_close(x, wanted[part], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "spec", ["kv-compress:budget=12,floor=8,window=4,recent=4", "snapkv:budget=12,window=4"]
)
def test_outputs_of_attention_are_free_before_the_next_layer(spec: str) -> None:
    cache = PolicyCache(parse(f"{spec}+k8v4"), SHAPE)
    cache.begin(torch.ones(2, 30, dtype=torch.bool), prompt=True)
    for layer in range(SHAPE.layers):
        query = torch.randn(2, SHAPE.kv_heads, SHAPE.group, 30, SHAPE.key_dim)
        key = torch.randn(2, SHAPE.kv_heads, 30, SHAPE.key_dim)
        value = torch.randn(2, SHAPE.kv_heads, 30, SHAPE.value_dim)
        out = weakref.ref(cache.attend(layer, query, key, value, 0.4))
        assert out() is None
