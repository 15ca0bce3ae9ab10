"""A self-contained page: its head, sections, style and script."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from kv_eval.report.markup import NOTHING, Markup, join, tag, text

STYLES: Final = ("page.css", "parts.css", "media.css")  # later ones override earlier ones
SCRIPT: Final = "page.js"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page.

    Attributes:
        name: its `id`, for links.
        title: its heading.
        content: its content; an empty section is omitted.
    """

    name: str
    title: str
    content: Markup


def frame(
    title: str,
    about: str,
    sections: Sequence[Section],
    *,
    style: Markup = NOTHING,
    script: Markup = NOTHING,
) -> bytes:
    """Return a page as UTF-8. Its own policy forbids other scripts and styles, and the network.

    Args:
        title: heading of the page.
        about: subject, below the title.
        sections: in order.
        style: styles in addition to those of every page.
        script: scripts likewise; they may use the script of every page.
    """
    there = [section for section in sections if section.content]
    styles = join(*(own("kv_eval.report", name) for name in STYLES), style)
    scripts = join(own("kv_eval.report", SCRIPT), script)
    body = tag(
        "body",
        None,
        tag(
            "header",
            None,
            tag("h1", None, text(title)),
            tag("p", {"class": "model"}, text(about)),
            tag(
                "nav",
                {"aria-label": "sections"},
                *(tag("a", {"href": f"#{each.name}"}, text(each.title)) for each in there),
            ),
        ),
        tag("main", None, *map(_section, there)),
        tag("div", {"id": "tip", "hidden": "", "aria-hidden": "true"}),
        tag("script", None, scripts),
    )
    html = tag("html", {"lang": "en"}, _head(f"{title}: {about}", styles, scripts), body)
    return f"<!doctype html>\n{html}\n".encode("utf-8", "replace")


def own(package: str, name: str) -> Markup:
    """Load a file of our packages, which is trusted markup."""
    return Markup(files(package).joinpath(name).read_text("utf-8"))


def _head(title: str, style: Markup, script: Markup) -> Markup:
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


def _section(section: Section) -> Markup:
    head = f"head-{section.name}"
    return tag(
        "section",
        {"id": section.name, "aria-labelledby": head},
        tag("h2", {"id": head}, text(section.title)),
        section.content,
    )


def _digest(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
