"""Values that are the first dimensions of their keys: bytes, and what is refused."""

import pytest
import torch

from kv_policy import CacheShape, KeyPrefix, RawCodec, TokenFormat, parse, tier_formats
from kv_policy.described import described
from kv_policy.pages import PageLayout

LATENT = CacheShape(3, 1, 8, 20, 12, dtype=torch.float32, value_in_key=True)


def test_a_format_of_latents_has_the_bytes_of_keys() -> None:
    policy = parse("raw")
    formats = policy.formats
    assert formats is not None
    for form, apart in zip(tier_formats(policy, LATENT), formats.bind(LATENT), strict=True):
        assert form.key == apart.key
        assert form.parts == apart.key.parts
        assert form.block == apart.block
        assert (form.value.dim, form.value_in_key, apart.value_in_key) == (12, True, False)
        x = torch.randn(5, form.block, 20)
        data = form.key.encode(x)
        assert form.value.encode(x[..., :12]).shape == (5, 0)
        assert torch.equal(form.value.decode(data), form.key.decode(data)[..., :12])
        assert apart.parts[apart.value_parts] == apart.value.parts
        assert form.parts[form.value_parts] == form.key.parts
        assert described(PageLayout.sized(form, form.block)).declined is not None


def test_a_token_of_latents_counts_once() -> None:
    assert LATENT.token_bytes == 3 * 20 * 4
    assert CacheShape(3, 1, 8, 20, 12, dtype=torch.float32).token_bytes == 3 * 32 * 4


def test_values_longer_than_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="values of 12 dimensions cannot be the first"):
        CacheShape(3, 1, 8, 10, 12, value_in_key=True)
    key = RawCodec(10, torch.float32)
    with pytest.raises(ValueError, match="first 12 dimensions of keys that have 10"):
        KeyPrefix(key, 12)
    with pytest.raises(ValueError, match="both must be the same"):
        TokenFormat(RawCodec(10, torch.float16), KeyPrefix(key, 4))
