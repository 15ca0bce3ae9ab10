"""Formats of latents, whose values are the first dimensions of their keys."""

import pytest
import torch

from kv_policy import CacheShape, parse, tier_formats
from kv_policy.described import described
from kv_policy.pages import PageLayout

LATENT = CacheShape(3, 1, 8, 20, 12, dtype=torch.float32, value_in_key=True)


@pytest.mark.parametrize("policy", ["raw", "k8v4", "k8v4:keys=channel", "bf16", "k4v2"])
def test_formats_of_latents_have_the_bytes_of_keys(policy) -> None:
    formats = parse(policy).formats
    assert formats is not None
    for form, apart in zip(tier_formats(parse(policy), LATENT), formats.bind(LATENT), strict=True):
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
