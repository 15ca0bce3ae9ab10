"""The generated tables in docs/methods: each method's source, parameters and lines of code.

`python -m tools.methods` writes them into the pages; a test fails if one is out of date. The rest
of a page is written by hand, around a block that starts with `<!-- facts of NAME -->`.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kv_policy import Part, installed, load
from kv_policy.files import write_whole
from tools.lines import MOST, Lines, counted

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "methods"
CITING = ROOT / "docs" / "citing.md"
OURS = {
    path.parent.name
    for folder in ("packages", "examples")
    for path in ROOT.glob(f"{folder}/*/pyproject.toml")
}
BLOCK = re.compile(r"^<!-- facts of ([\w-]+) -->\n.*?^<!-- end of facts -->$", re.M | re.S)
SOURCES = re.compile(r"^<!-- sources -->\n.*?^<!-- end of sources -->$", re.M | re.S)
LINES = re.compile(r"^<!-- lines of methods -->\n.*?^<!-- end of lines -->$", re.M | re.S)
# What is longer than MOST lines, and why.
LONGER: Final[Mapping[str, str]] = {
    "cake": "scores, budgets of layers, and variances from sums",
    "fastgen": "four strategies, in prompts and in decode steps",
    "formats": "seven codecs, each with its bound",
    "gate": "a network per head, its file, and kernels",
    "hadamard": "pairs of maps, and mean keys of a file",
    "kv-compress": "plans of prompts and of decode steps, in pages",
    "kvcrush": "bits of heads, and buckets",
    "leankv": "two tiers, thresholds, and its profile",
    "r-kv": "similarities in blocks, and plans from time to time",
    "zack": "a model whose weights hold the basis, and a rate that was searched",
}
INTEGER = re.compile(r"k\dv\d")
PLAIN = ("raw", "bf16", "fp16", "fp32")


def ours() -> tuple[str, ...]:
    """Return the methods of this repository's packages and examples."""
    found = installed().items()
    return tuple(name for name, entry in found if entry.dist and entry.dist.name in OURS)


def page_of(name: str) -> Path:
    """Return the page that describes a method; formats share one."""
    shared = INTEGER.fullmatch(name) or name in PLAIN
    return FOLDER / f"{'formats' if shared else name}.md"


def facts(part: type[Part]) -> str:
    """Return a method's source with its links, and its parameters as a table."""
    lines = [f"Source: {linked(part.source)}.", ""]
    rows = [
        f"| `{each.name}` | {either(each.type)} | {default(each.default)} | {each.doc} |"
        for each in part.parameters()
    ]
    head = ["| parameter | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join(lines + (head + rows if rows else ["It has no parameters."]))


def linked(source: str) -> str:
    """Turn the addresses in a source into links."""
    short = re.sub(
        r"https://arxiv\.org/abs/([\d.]+\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", source
    )
    return re.sub(r"(?<!\()https?://[^\s,;)]+", r"<\g<0>>", short)


def either(type_name: str) -> str:
    """Write a choice without `|`, which ends a table cell."""
    return type_name.replace(" | ", " or ").replace("str", "text").replace("bool", "true or false")


def default(text: str) -> str:
    """Write a default as in a policy's text."""
    return "required" if text == "required" else f"`{text}`"


def sources() -> str:
    """Return the table of sources, with one row for all formats."""
    by_page = {page_of(name).stem: name for name in sorted(ours(), reverse=True)}
    by_page["formats"] = "k8v4"
    rows = [
        f"| [{name if stem != 'formats' else 'formats'}](methods/{stem}.md) "
        f"| {linked(load(name).source)} |"
        for stem, name in sorted(by_page.items())
    ]
    return "\n".join(["| method | source |", "|---|---|", *rows])


def lengths() -> dict[str, Lines]:
    """Return the lines of code of each method, by the name of its page."""
    found = installed()
    modules = {name: found[name].value.partition(":")[0] for name in ours() if name not in PLAIN}
    return {page_of(name).stem: each for name, each in counted(modules).items()}


def line_counts() -> str:
    """Return the table of lines of code, with one row for all formats."""
    rows = [
        f"| [{stem}]({stem}.md) | {each.own} | {each.shared or ''} | {LONGER.get(stem, '')} |"
        for stem, each in sorted(lengths().items())
    ]
    head = f"| method | lines | shared | more than {MOST} |"
    return "\n".join([head, "|---|---:|---:|---|", *rows])


def written(page: str) -> str:
    """Return a page with each block as it is now."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- facts of {name} -->\n\n{facts(load(name))}\n\n<!-- end of facts -->"

    page = BLOCK.sub(block, page)
    page = LINES.sub(
        lambda _: f"<!-- lines of methods -->\n\n{line_counts()}\n\n<!-- end of lines -->", page
    )
    return SOURCES.sub(
        lambda _: f"<!-- sources -->\n\n{sources()}\n\n<!-- end of sources -->", page
    )


if __name__ == "__main__":
    for path in (CITING, *sorted(FOLDER.glob("*.md"))):
        before = path.read_text()
        after = written(before)
        if after != before:
            write_whole(path, after.encode())
            print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
