"""Formats whose bytes no kernel reads: every backend leaves them to the codec, and attends."""

import pytest
import torch

from attention_cases import Case, pack
from kv_attention import DenseTokens, all_backends
from kv_attention.gpu.backend import declined as declined_on_gpu
from kv_paging import select_page_kernels, torch_kernels
from kv_policy import CacheShape, Calibrated, PagedTokens, parse, tier_formats
from kv_quant.level_calibration import LevelCalibration

FORMATS = (
    "k4v4:outliers=1",
    "k3v3:group=16,outliers=2",
    "k4v4:levels=normal,outliers=1",
    "k8v4:levels=bfp,group=16",
    "k4v3:levels=fitted,file=FILE",
    "k3v3:levels=fitted,outliers=1,file=FILE",
)
SHAPE = CacheShape(layers=1, kv_heads=2, group=3, key_dim=40, value_dim=24)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of levels that were fitted to random vectors."""
    path = tmp_path_factory.mktemp("levels") / "levels.json"
    found, draw = LevelCalibration(SHAPE), torch.Generator().manual_seed(1)
    sizes = (1, 2, 3, 50, 40), (1, 2, 50, 40), (1, 2, 50, 24)
    found.see(0, *(torch.randn(size, generator=draw) for size in sizes))
    found.write(path, Calibrated("random", "0123", "-", "-"))
    return str(path)


def case_of(name: str, queries: int, file: str) -> Case:
    """A cache of table rows of several lengths, in pages with slots that hold no token."""
    (form,) = tier_formats(parse(name.replace("FILE", file)), SHAPE)
    draw = torch.Generator().manual_seed(3)
    key = torch.randn(2, 2, 23, 40, generator=draw)
    key[..., 5] *= 20
    value = torch.randn(2, 2, 23, 24, generator=draw)
    length = torch.tensor([[23, 7], [0, 16]])
    places = torch.arange(23).expand(2, 2, -1)
    pages = pack(key, value, length, (form.key, form.value), 5, 0)
    q = torch.randn(2, 2, 3, queries, 40, generator=draw)
    position = torch.arange(23, 23 + queries).expand(2, -1)
    fresh = [torch.randn(2, 2, queries, dim, generator=draw) for dim in (40, 24)]
    return Case(q, position, [pages], [DenseTokens(*fresh, position)], [places])


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("name", FORMATS)
def test_every_backend_attends_to_what_the_codec_decodes(
    name: str, queries: int, file: str
) -> None:
    case = case_of(name, queries, file)
    expected = case.attend(backend="reference").out.double()
    for backend, entry in all_backends().items():
        if entry.missing() is None and (not entry.devices or "cpu" in entry.devices):
            found = case.attend(backend=backend).out.double()
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_kernels_say_that_they_do_not_read_them(name: str, file: str) -> None:
    pytest.importorskip("kv_cpu")
    from kv_cpu.backend import declined

    case = case_of(name, 1, file)
    assert "is read and written by its own code" in str(declined(case.inputs()))
    (pages,) = case.pages
    assert isinstance(pages, PagedTokens)
    assert select_page_kernels(pages.layout, torch.device("cuda")) is torch_kernels
    assert select_page_kernels(pages.layout, torch.device("cpu")) is torch_kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kv_attention.gpu.backend.interpreted", lambda: True)
        assert "is read and written by its own code" in str(declined_on_gpu(case.inputs()))
