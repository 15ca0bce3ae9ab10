"""The page: its sections, style and script in one file that fetches nothing."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

from kv_serve.report.frontier import panels
from kv_serve.report.kept import kept
from kv_serve.report.markup import Markup, join, tag, text
from kv_serve.report.quality import quality
from kv_serve.report.read import Source
from kv_serve.report.run import run
from kv_serve.report.spectra import spectra
from kv_serve.report.speed import speed

TITLE: Final = "Quality against bytes held"
STYLES: Final = ("page.css", "parts.css", "media.css")  # the last ones change the first


def page(sources: Sequence[Source]) -> bytes:
    """Write the page of one or more files of one model, as UTF-8.

    Without a script it has every picture, table and number; the script adds sorting, and what a
    point says when it is pointed at. Its own policy forbids all other scripts, and the network.

    Args:
        sources: as `read` gives them.
    """
    found, names = panels(sources), tuple(source.name for source in sources)
    sections = (
        ("quality", "Quality", quality(found, names)),
        ("speed", "Speed", speed(found, names)),
        ("kept", "Tokens kept", kept(sources)),
        ("spectra", "Singular values", spectra(sources)),
        ("run", "What was run", run(sources)),
    )
    there = [(name, title, content) for name, title, content in sections if content]
    model = sources[0].report.model
    body = tag(
        "body",
        None,
        tag(
            "header",
            None,
            tag("h1", None, text(TITLE)),
            tag("p", {"class": "model"}, text(model)),
            tag(
                "nav",
                {"aria-label": "sections"},
                *(tag("a", {"href": f"#{name}"}, text(title)) for name, title, _ in there),
            ),
        ),
        tag("main", None, *(_section(*section) for section in there)),
        tag("div", {"id": "tip", "hidden": "", "aria-hidden": "true"}),
        tag("script", None, _own("page.js")),
    )
    html = tag("html", {"lang": "en"}, _head(f"{TITLE}: {model}"), body)
    return f"<!doctype html>\n{html}\n".encode("utf-8", "replace")


def _head(title: str) -> Markup:
    style, script = join(*map(_own, STYLES)), _own("page.js")
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}"
    return tag(
        "head",
        None,
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("meta", {"name": "color-scheme", "content": "light dark"}),
        tag("title", None, text(title)),
        tag("style", None, style),
    )


def _section(name: str, title: str, content: Markup) -> Markup:
    head = f"head-{name}"
    return tag(
        "section",
        {"id": name, "aria-labelledby": head},
        tag("h2", {"id": head}, text(title)),
        content,
    )


def _own(name: str) -> Markup:
    """Read a file of this package, which is markup as it is."""
    return Markup(files("kv_serve.report").joinpath(name).read_text("utf-8"))


def _digest(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
