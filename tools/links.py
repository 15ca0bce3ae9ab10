"""Checks the links of a built site, without a network.

`python -m tools.links site` fails if a link inside the site has no target, if a page lacks the
anchor, or if a page would fetch something from another host when opened.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

# Elements that a browser fetches by itself; an <a> needs a click.
FETCHED: Final = {
    "audio": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "script": "src",
    "source": "src",
    "video": "src",
}
NAMES_ONLY: Final = frozenset({"canonical", "next", "prev", "alternate"})  # relations of <link>


@dataclass
class Page(HTMLParser):
    """The anchors of a page, its link targets, and the resources it fetches."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Initialize the parser."""
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record one element."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        target = given.get(FETCHED.get(tag, ""), "")
        if target and given.get("rel", "") not in NAMES_ONLY:
            self.fetched.append(target)


def read(path: Path) -> Page:
    """Parse a page."""
    page = Page()
    page.feed(path.read_text())
    return page


def target_of(site: Path, path: Path, address: str) -> Path:
    """Return the file that an address on a page refers to."""
    part = unquote(urlsplit(address).path)
    base = site if part.startswith("/") else path.parent
    found = (base / part.lstrip("/")).resolve() if part else path.resolve()
    return found / "index.html" if found.is_dir() else found


def wrong(site: Path) -> Iterator[str]:
    """Yield the defects, one sentence each."""
    pages = {path.resolve(): read(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} has no page; build it first: nox -s docs"
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        for address in page.fetched:
            if urlsplit(address).netloc:
                yield f"{here} fetches {address}; put it into the site"
        for address in dict.fromkeys((*page.links, *page.fetched)):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = target_of(site, path, address)
            if not target.is_file():
                yield f"{here} links to {address}, but that file does not exist"
            elif target in pages and parts.fragment:
                anchor = unquote(parts.fragment)
                if anchor not in pages[target].anchors:
                    yield f"{here} links to {address}, but that page has no such anchor"


def main(folder: str) -> int:
    """Print the defects of a site; return exit status 1 if there are any."""
    site = Path(folder)
    found = list(wrong(site))
    for sentence in found:
        print(sentence, file=sys.stderr)
    if not found:
        print(f"{len(list(site.rglob('*.html')))} pages, no broken links")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
