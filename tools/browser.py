"""Opens the built site and other pages in Chromium, and checks them for visible defects.

`nox -s browser` builds the site, writes a report and an inspection page with `kv-serve`, and runs
this. It needs a Chromium (Debian: `apt-get install chromium`), so it is run by hand. Every page is
opened wide and narrow, light and dark: nothing may be wider than the window, no image may be
missing, text needs enough contrast, the console must be empty, and nothing may be fetched from
another host. The first page of the site fits one screen, and its search finds a method.
"""

import argparse
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZES: Final = ((1280, 800), (390, 844))
SCHEMES: Final = ("light", "dark")
SHOWN: Final = (
    "",
    "tutorials/serve/",
    "explanation/formats/",
    "explanation/vllm/",
    "methods/snapkv/",
    "methods/formats/",
    "methods/zack/",
    "methods/think/",
    "benchmarks/",
    "benchmarks/vllm-capacity/",
    "models/",
)
SOUGHT: Final = ("snapkv", "methods/snapkv/")
WIDER: Final = "document.documentElement.scrollWidth - window.innerWidth"
MISSING: Final = "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
# The luminance of the page and of its text, as defined by WCAG 2.
LUMINANCE: Final = """(() => {
  const part = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const of = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(v => part(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const body = getComputedStyle(document.body), root = getComputedStyle(document.documentElement);
  const behind = body.backgroundColor === "rgba(0, 0, 0, 0)" ? root : body;
  return [of(behind.backgroundColor), of(body.color)];
})()"""
LEAST_CONTRAST: Final = 7.0  # of running text, at WCAG's stricter level
BOTTOM: Final = "document.querySelector('.md-content__inner').lastElementChild"
END: Final = f"Math.ceil({BOTTOM}.getBoundingClientRect().bottom)"


class Quiet(SimpleHTTPRequestHandler):
    """Serve files without logging."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site, which its search needs; yield the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def addresses(site: Path) -> list[str]:
    """Return the pages, relative to the site."""
    found = (path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    return sorted("" if name == "." else f"{name}/" for name in found)


def watch(page: "Page", root: str, found: list[str]) -> None:
    """Record console messages and requests to other hosts."""

    def console(kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            found.append(f"console message: {text}")

    def request(url: str) -> None:
        if not url.startswith((root, "data:", "blob:")):
            found.append(f"{url} is fetched")

    page.on("console", lambda message: console(message.type, message.text))
    page.on("pageerror", lambda error: found.append(f"a script fails: {error}"))
    page.on("request", lambda sent: request(sent.url))


def looked_at(
    browser: "Browser", root: str, pages: list[str], site: bool, pictures: Path | None
) -> Iterator[str]:
    """Open all pages in all sizes and schemes; yield the defects."""
    for width, height in SIZES:
        for scheme in SCHEMES:
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page, heard = context.new_page(), list[str]()
            watch(page, root, heard)
            for address in pages:
                heard.clear()
                page.goto(root + address, wait_until="load")
                heard += wrong(page, scheme)
                if site and not address and width > 1000 and (end := page.evaluate(END)) > height:
                    heard.append(f"it ends at {end}, below the first screen")
                if pictures is not None and (not site or address in SHOWN):
                    named = address.strip("/").replace("/", "-") or "start"
                    path = pictures / f"{named}-{width}-{scheme}.png"
                    page.screenshot(path=path, full_page=not site)
                where = f"/{address} at {width}, {scheme}"
                yield from (f"{where}: {sentence}" for sentence in dict.fromkeys(heard))
            if site:
                yield from sought(page, root, width)
            context.close()


def wrong(page: "Page", scheme: str) -> Iterator[str]:
    """Yield the defects of an open page."""
    if (wider := page.evaluate(WIDER)) > 0:
        yield f"it is {wider} pixels wider than the window"
    yield from (f"{source} is not shown" for source in page.evaluate(MISSING))
    behind, text = page.evaluate(LUMINANCE)
    if (behind < text) != (scheme == "dark"):
        yield f"it is not {scheme}"
    contrast = (max(behind, text) + 0.05) / (min(behind, text) + 0.05)
    if contrast < LEAST_CONTRAST:
        yield f"text has a contrast of {contrast:.1f}; the minimum is {LEAST_CONTRAST}"


def sought(page: "Page", root: str, width: int) -> Iterator[str]:
    """Search for a method."""
    word, address = SOUGHT
    page.goto(root, wait_until="load")
    if width < 1000:
        page.locator("label.md-header__button[for='__search']").first.click()
    page.locator("input.md-search__input").first.click()
    page.keyboard.type(word)
    try:
        page.wait_for_selector(f".md-search-result a[href*='{address}']", timeout=10_000)
    except Exception as error:  # a type that only playwright defines
        yield f"the search at {width} does not find {word}: {str(error).splitlines()[0]}"


def chromium() -> str | None:
    """Return a Chromium on this machine, if any."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def main() -> int:
    """Print the defects; return exit status 1 if there are any, 2 without a Chromium."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path, help="the folder built by mkdocs")
    parser.add_argument("alone", type=Path, help="a folder of other pages, each in its own folder")
    parser.add_argument("pictures", type=Path, nargs="?", help="folder for screenshots")
    given = parser.parse_args()
    program = chromium()
    if program is None:
        print(f"no Chromium found on the path; tried {', '.join(NAMES)}")
        return 2
    from playwright.sync_api import sync_playwright

    if given.pictures is not None:
        given.pictures.mkdir(parents=True, exist_ok=True)
    found, opened = list[str](), 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for folder in (given.site, given.alone):
            pages = addresses(folder)
            opened += len(pages)
            with served(folder) as root:
                of_site = folder == given.site
                found += looked_at(browser, root, pages, of_site, given.pictures)
        browser.close()
    for sentence in found:
        print(sentence, file=sys.stderr)
    times = len(SIZES) * len(SCHEMES)
    print(f"{opened} pages, {times} times each: {len(found) or 'no'} defects")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
