"""Layers of prompts that enter pages together hold what each holds alone, but for rounding."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kv_policy import KVPolicy, compose, parse
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
