"""The library is found, selects an instruction set, and reports errors."""

import hashlib
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from attention_cases import random_case
from kv_attention import BackendChoice, all_backends, available, choose_backend
from kv_cpu import chosen, compiled, forced, missing, runnable
from kv_cpu.library import FILE, FORCE, INTERFACE, _load, _loaded, _wrong, folders


def test_it_loads_and_kv_attention_finds_it():
    assert missing() is None
    assert available()["cpu"] is None
    assert choose_backend("cpu") == BackendChoice("cpu", {})
    found = all_backends()["cpu"].instructions()
    assert (found.compiled, found.runnable) == (compiled(), runnable())
    assert (found.chosen, found.forced) == (chosen(), forced())


def test_the_plain_kernels_run_anywhere_and_the_best_is_chosen():
    assert runnable()[0] == compiled()[0] == "plain"
    assert set(runnable()) <= set(compiled())
    with patch.dict(os.environ):
        os.environ.pop(FORCE, None)
        assert chosen() == runnable()[-1]
        assert chosen() != "amx-emulated"
        assert ("amx" in runnable()) == (chosen() == "amx")
        assert forced() is None


@pytest.mark.parametrize("isa", runnable())
def test_an_instruction_set_can_be_forced(isa):
    with patch.dict(os.environ, {FORCE: isa}):
        assert chosen() == isa
        assert forced() == f"KV_CPU_ISA={isa}"


@pytest.mark.parametrize("isa", ["sparc", *sorted(set(compiled()) - set(runnable()))])
def test_one_that_is_not_there_is_refused(isa):
    with patch.dict(os.environ, {FORCE: isa}):
        wanted = f"KV_CPU_ISA is '{isa}'; this machine can run"
        assert choose_backend("cpu").passed_over["cpu"].startswith(wanted)
        with pytest.raises(ValueError, match=wanted):
            random_case(1, L=1).attend(backend="cpu")


def test_a_library_that_was_not_built_or_does_not_load(tmp_path):
    _load.cache_clear()
    try:
        with patch("kv_cpu.library.folders", lambda: [tmp_path]):
            assert "was not built" in _load()
            assert "was not built" in available()["cpu"]
            _load.cache_clear()
            (tmp_path / "libkv_cpu.so").write_text("not a library")
            assert _load().startswith("its library does not load")
            with pytest.raises(ValueError, match="'cpu' cannot be used here: its library does not"):
                random_case(1, L=1).attend(backend="cpu")
    finally:
        _load.cache_clear()


def test_a_library_that_was_cut_off_or_is_another(tmp_path):
    whole = next(path for path in (each / FILE for each in folders()) if path.is_file())
    data = whole.read_bytes()
    (tmp_path / FILE).write_bytes(data[: len(data) // 2])
    if sys.platform == "linux":
        assert f"is truncated at {len(data) // 2} of" in _wrong(tmp_path / FILE)
    (tmp_path / FILE).write_bytes(data[:30])
    assert "is not a library for this machine" in _wrong(tmp_path / FILE)
    (tmp_path / FILE).write_bytes(data)
    assert _wrong(tmp_path / FILE) is None
    with patch("kv_cpu.library.INTERFACE", INTERFACE + 1):
        reason = f"has interface {INTERFACE}, and these sources have {INTERFACE + 1}"
        assert reason in _loaded(whole)
    shared = "libshm.dylib" if sys.platform == "darwin" else "libshm.so"
    stranger = Path(torch.__file__).parent / "lib" / shared
    with patch("torch.ops.kv_cpu", object()):
        assert "has interface 0" in _loaded(stranger)


def test_the_interface_is_counted_on_where_operators_change():
    """Increment INTERFACE when operators change, so that older libraries are rejected.

    Some numbers are of new meanings of the same signatures: 9 has codes of 3 bits and of levels.
    """
    csrc = Path(__file__).parents[1] / "csrc"
    found = "".join(path.read_text() for path in sorted(csrc.glob("*op.cpp")))
    schemas = re.sub(r'"\s*"|\s', "", "".join(re.findall(r"m\.def\((.*?)\);", found, re.DOTALL)))
    known = {
        1: "b3d6cc2af7ba7d33",
        2: "9af22479b40f30fa",
        3: "ed592a839e444502",
        4: "9fbab260573a8494",
        5: "bf05f305ae4522c5",
        6: "eae599e9452ac9cc",
        7: "5e0d889a7acf307c",
        8: "1110610d64f172e0",
        9: "1110610d64f172e0",
        10: "36d41049b189396d",
        11: "a0d3d85aaae29a6f",
        12: "1b0dbe4f00bfe403",
        13: "9b1ab599ca6a6e70",
        14: "502bda8c65eaaba6",
    }
    assert hashlib.sha256(schemas.encode()).hexdigest()[:16] == known[INTERFACE]


@pytest.mark.parametrize("isa", ["PLAIN", " plain", "plain ", "plain,avx2", "\n", "0", "ünsinn"])
def test_nonsense_in_the_environment_is_refused(isa):
    with patch.dict(os.environ, {FORCE: isa}):
        assert missing().startswith(f"KV_CPU_ISA is {isa!r}; this machine can run plain")


def test_what_an_editable_install_built_is_found_by_its_metadata(tmp_path):
    class Installed:
        def locate_file(self, path):
            return tmp_path / path

    with patch("kv_cpu.library.distribution", lambda name: Installed()):
        assert folders()[-1] == tmp_path / "kv_cpu"


def test_importing_it_loads_nothing():
    code = "import torch, kv_cpu; print(hasattr(torch.ops.kv_cpu, 'decode'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("page", [-1, 10**6, -(2**31)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_page_outside_of_the_pool_is_an_error(page, threads):
    c = random_case(2, L=1, stored=300, page=16, tiers=[("8", "4"), ("4", "2")])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        c.pages[1].table[1, 1, 0] = page
        with pytest.raises(RuntimeError, match=rf"pages\[1\] has page {page} in its table"):
            c.attend(backend="cpu")
    finally:
        torch.set_num_threads(before)


def test_random_tables_never_lead_out_of_the_pool():
    g = torch.Generator().manual_seed(3)
    c = random_case(3, L=1, stored=50, holes=True, tiers=[("8", "4"), ("4", "2")])
    for _ in range(30):
        for pages in c.pages:
            pool = len(pages.data)
            drawn = torch.randint(-1, pool + 1, pages.table.shape, generator=g)
            pages.table.copy_(drawn)
            pages.data.copy_(torch.randint(0, 256, pages.data.shape, generator=g))
        with suppress(RuntimeError):  # of a page that is not there; some draws have none
            c.attend(backend="cpu")


def test_lengths_that_cannot_be_are_errors():
    c = random_case(4, L=1, known=True)
    c.pages[0].length[0, 0] = -1
    with pytest.raises(RuntimeError, match="a table row has -1 tokens; its table covers 0 to"):
        c.attend(backend="cpu")
    c.pages[0].length[0, 0] = 10**9
    with pytest.raises(RuntimeError, match="a table row has 1000000000 tokens"):
        c.attend(backend="cpu")
