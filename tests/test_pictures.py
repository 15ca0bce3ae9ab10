"""Pictures in the documentation are drawn from results, and can be read on any page."""

import copy
import re
from pathlib import Path

import pytest

from tools import figures
from tools.figures import IMAGES, METHODS, ROOT, START, pictures, spoken
from tools.methods import FOLDER

MOST_BYTES = 60_000
PICTURE = re.compile(r"^!\[([^\]]+)\]\(\.\./images/methods/([\w-]+)\.svg\)$", re.MULTILINE)
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem != "index")
DRAWN = pictures()

each_picture = pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
each_method = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@each_picture
def test_a_picture_is_as_it_would_be_drawn(path: Path) -> None:
    assert path.read_text() == DRAWN[path], "run python -m tools.figures"


@each_picture
def test_a_picture_is_small_and_has_no_background(path: Path) -> None:
    text = path.read_text()
    assert len(text.encode()) < MOST_BYTES
    assert text.startswith("<svg ")
    assert "<title>" in text
    assert not re.search(r"#fff|white|#000|black", text)


def test_no_other_picture_lies_beside_them() -> None:
    assert {*METHODS.glob("*")} == {*DRAWN} - {START}


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_first_page_says_what_its_picture_shows(page: str) -> None:
    text = (ROOT / page).read_text()
    place = IMAGES.relative_to((ROOT / page).parent) / START.name
    assert f"![{spoken()}]({place})" in text


@each_method
def test_a_method_has_a_picture_with_words_for_it(page: Path) -> None:
    assert METHODS / f"{page.stem}.svg" in DRAWN
    found = PICTURE.findall(page.read_text())
    assert [name for _, name in found] == [page.stem]
    assert len(found[0][0]) > 40


def test_a_number_that_changed_changes_its_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {name: copy.deepcopy(figures.result(name)) for name in figures.SOURCES}
    row = next(row for row in changed["peers"]["rows"] if row.get("way") == "fp8")
    row["held"] += 0.1
    rows = changed["method_figures"]["rows"]
    next(row for row in rows if row.get("method") == "snapkv")["heads"][0] = "1 1 1"
    monkeypatch.setattr(figures, "result", changed.__getitem__)
    differ = {path.stem for path, text in figures.pictures().items() if text != DRAWN[path]}
    assert differ == {"start", "snapkv"}


def test_diagrams_are_read_on_any_page_too() -> None:
    diagrams = sorted((IMAGES / "explanation").glob("*.svg"))
    assert diagrams
    for path in diagrams:
        text = path.read_text()
        assert "<title>" in text
        assert not re.search(r"#fff|white|#000|black|https?://(?!www\.w3\.org/2000/svg)", text)
