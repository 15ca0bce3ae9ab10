from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kv_policy import HeadBasis, LayerBasis
from kv_svd import load, save


def layers() -> tuple[LayerBasis, ...]:
    matrix = torch.linalg.qr(torch.randn(2, 8, 8)).Q
    cut = matrix[..., :5] * (torch.arange(5) < torch.tensor([[5], [3]]))[:, None]
    whole, part = HeadBasis(matrix, (8, 8)), HeadBasis(cut, (5, 3))
    return (LayerBasis(whole, part), LayerBasis(None, part), LayerBasis())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path, saved = tmp_path / "bases.safetensors", layers()
    save(path, saved, "a model")
    loaded = load(path, "a model")
    assert len(loaded) == len(saved)
    for ours, theirs in zip(loaded, saved, strict=True):
        for one, other in ((ours.key, theirs.key), (ours.value, theirs.value)):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.rank == other.rank
                assert torch.equal(one.matrix, other.matrix)
    assert [p.name for p in tmp_path.iterdir()] == ["bases.safetensors"]


def test_equal_bases_give_equal_files_and_replace_old_ones(tmp_path: Path) -> None:
    path, found = tmp_path / "bases", layers()
    path.write_text("older")
    save(path, found, "m")
    first = path.read_bytes()
    save(path, found, "m")
    assert path.read_bytes() == first


def test_the_model_must_be_the_one_that_was_fitted(tmp_path: Path) -> None:
    path = tmp_path / "bases"
    save(path, layers(), "model one")
    with pytest.raises(ValueError, match="was fitted to the model model one, not to model two"):
        load(path, "model two")


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist; fit bases for the model"):
        load(tmp_path / "none", "m")


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "bases"
    save(path, layers(), "m")
    whole = path.read_bytes()
    for place in range(0, len(whole), 61):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"is damaged|holds no bases of the format"):
            load(path, "m")
    for length in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is damaged or no safetensors file"):
            load(path, "m")


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="holds no bases of the format 'kv-svd 1'"):
        load(path, "m")
