"""The gallery has a page for every method, and its tables are those that the classes give."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from kv_evict.heads_calibration import HeadsCalibration
from kv_policy import CacheShape, Calibrated, installed, load, parse
from kv_quant.level_calibration import LevelCalibration
from kv_svd import Calibration
from tools.lines import MOST, code_lines, counted
from tools.methods import (
    CITING,
    FOLDER,
    INTEGER,
    LONGER,
    PLAIN,
    ROOT,
    lengths,
    ours,
    page_of,
    written,
)

NAMES = ours()
PAGES = sorted(FOLDER.glob("*.md"))
TITLE = re.compile(r"^  title  = \{(.+)\},$", re.MULTILINE)
EPRINT = re.compile(r"eprint = \{([\d.]+)\}")
METHOD = '''"""A method.

Of two lines.
"""

import os  # a comment
from os import (
    path,
)

TEXT = """One,

and three."""


# Why.
def two():
    """Two."""

    return (
        1,  # one
        2,
    )
'''
EXAMPLES = re.compile(r"^##+ Example\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)

each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
each_method = pytest.mark.parametrize("name", NAMES)


def examples(path: Path) -> list[str]:
    return [line for block in EXAMPLES.findall(path.read_text()) for line in block.splitlines()]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that examples name, of a made-up model with four KV heads."""
    folder = tmp_path_factory.mktemp("calibrated")
    draw = torch.Generator().manual_seed(0)
    shape = CacheShape(layers=1, kv_heads=4, group=2, key_dim=64, value_dim=64)
    found = Calibration(shape, torch.randn(1, 64, 4 * 2 * 64, generator=draw), 4)
    query = torch.randn(1, 4, 2, 400, 64, generator=draw)
    key, value = torch.randn(2, 1, 4, 400, 64, generator=draw)
    found.see(0, query, key, value)
    facts = Calibrated("made up", "0123456789abcdef", "-", "-")
    found.write(folder / "found.safetensors", facts)
    heads = HeadsCalibration(shape, 200)
    heads.see(0, query, key, value)
    heads.write(folder / "heads.safetensors", facts)
    levels = LevelCalibration(shape)
    levels.see(0, query, key, value)
    levels.write(folder / "levels.json", facts)
    return folder


@each_method
def test_a_method_has_a_page_with_its_facts(name: str) -> None:
    text = page_of(name).read_text()
    assert f"`{name}`" in text
    shown = "k8v4" if INTEGER.fullmatch(name) else "raw" if name in PLAIN else name
    assert f"<!-- facts of {shown} -->" in text


@pytest.mark.parametrize("path", [CITING, *PAGES], ids=lambda path: path.stem)
def test_what_is_generated_is_as_it_would_be_written(path: Path) -> None:
    text = path.read_text()
    assert written(text) == text, "run python -m tools.methods"


def test_a_table_that_went_stale_is_noticed() -> None:
    text = page_of("snapkv").read_text()
    stale = text.replace("| `window` | int | `32` |", "| `window` | int | `64` |")
    assert stale != text
    assert written(stale) == text


def test_methods_of_more_lines_say_why() -> None:
    found = lengths()
    assert {name for name, each in found.items() if each.own > MOST} == {*LONGER}
    assert all(each.own > 0 for each in found.values())


def test_lines_are_those_of_code(tmp_path: Path) -> None:
    (tmp_path / "method.py").write_text(METHOD)
    assert code_lines(tmp_path / "method.py") == 3 + 1 + 4


def test_lines_of_a_file_that_methods_share_are_counted_apart() -> None:
    """Those of another method are, too."""
    names = {name: f"kv_evict.{name}" for name in ("h2o", "d2o", "kvmerger", "tova")}
    found, folder = counted(names), ROOT / "packages" / "kv-evict" / "src" / "kv_evict"
    assert found["tova"].own == code_lines(folder / "tova.py")
    assert found["h2o"].own == code_lines(folder / "h2o.py")
    assert found["h2o"].shared >= code_lines(folder / "heavy_hitters.py")
    assert found["kvmerger"].own == code_lines(folder / "kvmerger.py")
    assert found["kvmerger"].shared >= code_lines(folder / "d2o.py")
    assert counted({"d2o": names["d2o"]})["d2o"].shared == 0


def test_formats_that_share_a_page_share_what_it_says() -> None:
    kinds = {name for name in installed() if INTEGER.fullmatch(name)}
    assert len(kinds) == 25
    for name in kinds:
        assert (load(name).parameters(), load(name).source) == (
            load("k8v4").parameters(),
            load("k8v4").source,
        )
    assert not any(load(name).parameters() for name in PLAIN)


@each_page
def test_a_page_says_all_that_pages_say(path: Path) -> None:
    if path.stem == "index":
        return
    titles = re.findall(r"^##+ (.+)$", path.read_text(), re.MULTILINE)
    wanted = ["Formula", "Example", "When to use it", "Limits"]
    assert [title for title in titles if title in wanted][:4] == wanted
    assert examples(path)


@each_page
def test_examples_are_policies(
    path: Path, calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(calibrated)
    named = {part.partition(":")[0] for text in examples(path) for part in text.split("+")}
    assert path.stem in {*named, "index", "formats"}
    for text in examples(path):
        assert str(parse(text))


def test_every_page_is_found_from_the_index_and_the_menu() -> None:
    menu = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    listed = str(yaml.safe_load(menu)["nav"])
    index = (FOLDER / "index.md").read_text()
    for path in PAGES:
        assert f"'methods/{path.name}'" in listed
        assert path.stem == "index" or f"]({path.name}" in index


def test_the_file_for_citing_names_the_papers_of_the_page() -> None:
    given = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert given["cff-version"] == "1.2.0"
    papers = {each["url"].rpartition("/")[2]: each["title"] for each in given["references"]}
    page = CITING.read_text()
    titles = [title.translate({ord(c): None for c in "{}"}) for title in TITLE.findall(page)]
    assert papers == dict(zip(EPRINT.findall(page), titles, strict=True))
