"""Of a grid some cases run at every change, with every value of every parameter among them."""

import subprocess
import sys
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).parent.parent
GRID = """
import pytest

@pytest.mark.grid(4)
@pytest.mark.parametrize("a", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("b", ["x", "y", "z", "w", "v"])
def test_two(a, b):
    pass

@pytest.mark.grid(1000)
@pytest.mark.parametrize("a", [0, 1, 2, 3, 4])
def test_one(a):
    pass

@pytest.mark.grid(1000)
def test_none():
    pass
"""


def test_a_grid_keeps_one_case_in_n_and_every_value(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "test_grid.py").write_text(GRID)
    found = ("-o", f"pythonpath={ROOT}")  # for what the file imports
    given = (*found, "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "slow")
    run = subprocess.run(
        (sys.executable, "-m", "pytest", *given), cwd=tmp_path, capture_output=True, text=True
    )
    slow = {name.partition("::")[2] for name in run.stdout.splitlines() if "::" in name}
    assert "test_none" in slow
    assert not any(name.startswith("test_one") for name in slow)  # every case brings a value
    kept = {(a, b) for a in "01234" for b in "xyzwv" if f"test_two[{b}-{a}]" not in slow}
    assert len(kept) < 25
    assert {a for a, _ in kept} == {*"01234"}
    assert {b for _, b in kept} == {*"xyzwv"}
    for a, b in {(a, b) for a in "01234" for b in "xyzwv"} - kept:
        assert crc32(f"test_two[{b}-{a}]".encode()) % 4
