"""Values that are the first dimensions of their keys: bytes, and what is refused."""

import pytest
import torch

from kv_policy import CacheShape, KeyPrefix, RawCodec, TokenFormat, parse, tier_formats

LATENT = CacheShape(3, 1, 8, 20, 12, dtype=torch.float32, value_in_key=True)


def test_values_are_decoded_from_their_keys() -> None:
    (form,) = tier_formats(parse("raw"), LATENT)
    x = torch.randn(5, form.block, 20)
    assert form.value.encode(x[..., :12]).shape == (5, 0)
    assert torch.equal(form.value.decode(form.key.encode(x)), x[..., :12])
    assert (form.value_in_key, form.nbytes, form.value_parts) == (True, 80, slice(1))


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
