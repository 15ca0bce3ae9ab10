"""The checker of links notices what leads nowhere, and what would be fetched from elsewhere."""

from pathlib import Path

import pytest

from tools.links import main, wrong

GOOD = """<html><head><link rel="stylesheet" href="a.css"><link rel="canonical" href="https://x.y/">
</head><body><h1 id="top">A</h1><a href="sub/#there">b</a><a href="https://elsewhere.org">c</a>
<a href="#top">d</a><img src="a%20b.svg"></body></html>"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(GOOD)
    below = '<a href="..">up</a><p id="there"><a href="/">x</a>'
    (tmp_path / "sub" / "index.html").write_text(below)
    (tmp_path / "a.css").touch()
    (tmp_path / "a b.svg").touch()
    return tmp_path


def test_a_site_whose_links_lead_somewhere_is_good(site: Path) -> None:
    assert list(wrong(site)) == []
    assert main(str(site)) == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("sub/#there", "sub/#nowhere", "no such anchor"),
        ("#top", "#bottom", "no such anchor"),
        ("sub/#there", "other/", "does not exist"),
        ("a%20b.svg", "b.svg", "does not exist"),
        ('href="a.css"', 'href="https://cdn.org/a.css"', "fetches https://cdn.org/a.css"),
        ('src="a%20b.svg"', 'src="//cdn.org/a.svg"', "fetches //cdn.org/a.svg"),
    ],
)
def test_what_is_wrong_is_said(site: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    (site / "index.html").write_text(GOOD.replace(old, new, 1))
    (sentence,) = wrong(site)
    assert said in sentence
    assert main(str(site)) == 1


def test_a_folder_without_a_page_is_no_site(tmp_path: Path) -> None:
    assert "has no page" in next(wrong(tmp_path))
