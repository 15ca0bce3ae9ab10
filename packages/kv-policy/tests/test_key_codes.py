"""The layout and the rotation of codes of keys."""

import pytest
import torch

from kv_policy.key_codes import code_bytes, code_rotation
from kv_policy.orthogonal import spreading

CPU = torch.device("cpu")


@pytest.mark.parametrize("dim", [1, 3, 16, 17, 64, 80, 96, 128, 576])
def test_the_rotation_is_orthogonal_and_is_not_undone_by_that_of_stored_keys(dim: int) -> None:
    found = code_rotation(dim, CPU).double()
    torch.testing.assert_close(found @ found.mT, torch.eye(dim).double(), rtol=0, atol=1e-5)
    if dim >= 64:
        twice = spreading(dim) @ found  # keys in the basis `hadamard`
        assert twice.abs().max() < 5 / dim**0.5
        signs = found @ spreading(dim).mT
        assert abs(float(signs.diagonal().sum())) < dim / 4  # about as many of either sign


@pytest.mark.parametrize(("dim", "tokens", "nbytes"), [(128, 16, 544), (64, 16, 288), (17, 3, 30)])
def test_bytes_of_a_page(dim: int, tokens: int, nbytes: int) -> None:
    assert code_bytes(dim, tokens) == nbytes


def test_the_rotation_is_found_under_any_default_device() -> None:
    """vLLM changes it while a model is loaded."""
    code_rotation.cache_clear()
    spreading.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        found = code_rotation(24, CPU)
    assert found.device == CPU
    assert not found.is_inference()
    assert not spreading(24).is_inference()
