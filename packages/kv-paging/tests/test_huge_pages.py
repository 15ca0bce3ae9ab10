"""Huge pages: a request that never changes what is stored, and that says whether it was granted."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool, back_with_huge_pages
from kv_paging.huge_pages import HUGE

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def backed(data: Tensor) -> int:
    """Bytes of a tensor in huge pages, as the system counts them for its mapping."""
    found, inside = 0, False
    middle = data.data_ptr() + data.nbytes // 2
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(each, 16) for each in head.split("-"))
            inside = first <= middle < last
        elif inside and head == "AnonHugePages:":
            found = int(line.split()[1]) << 10
    return found


def granted() -> bool:
    """Whether the system gives huge pages to those who ask."""
    return SETTING.is_file() and "[never]" not in SETTING.read_text()


@pytest.mark.parametrize("size", [0, 1, HUGE - 1, HUGE, 3 * HUGE + 17])
def test_contents_stay(size: int) -> None:
    """Whatever the size and the answer, no byte changes."""
    data = torch.arange(size, dtype=torch.int32).to(torch.uint8)
    before = data.clone()
    back_with_huge_pages(data)
    assert torch.equal(data, before)


def test_small_memory_is_left_alone() -> None:
    """What contains no whole huge page is not asked for."""
    assert not back_with_huge_pages(torch.zeros(HUGE // 2, dtype=torch.uint8))


@pytest.mark.skipif(not granted(), reason="this system gives no huge pages on request")
def test_pools_are_in_huge_pages() -> None:
    """The pages of a pool are, where the system gives them."""
    pool = PagePool(4096, 16 * HUGE // 4096)
    assert backed(pool.data) > 0


def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the request is declined, and no function is looked for."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not back_with_huge_pages(torch.zeros(4 * HUGE, dtype=torch.uint8))
