"""The page of models and the table of the README: written from the committed result.

`python -m tools.models.page` writes both; a test fails if one is out of date. The prose around the
blocks is written by hand.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tools.models.families import FAMILIES, IN_VLLM
from tools.models.results import ROOT, Row, rows
from tools.tables.markdown import table
from tools.tables.page import result

PAGE: Final = ROOT / "docs" / "models.md"
README: Final = ROOT / "README.md"
BLOCK: Final = re.compile(r"^<!-- models: ([\w ]+) -->\n.*?^<!-- end of models -->$", re.M | re.S)
WIDTH: Final = 120
FULL: Final = "full_attention"
# What the model keeps of a layer that is not compressed, by transformers' type.
REST: Final[Mapping[str, str]] = {
    "sliding_attention": "sliding window",
    "chunked_attention": "chunked",
    "linear_attention": "linear attention or state space",
    "conv": "convolution",
    "hybrid": "attention beside a state",
    "hybrid_sliding": "sliding window beside a state",
    "indexed_attention": "attention with an indexer",
    "dummy": "no keys and values of its own",
}


def rest(row: Row) -> str:
    """Return the layers that are not of full attention, by type."""
    others = {kind: count for kind, count in row.get("layers", {}).items() if kind != FULL}
    return ", ".join(
        f"{count} {REST.get(kind, kind.replace('_', ' '))}" for kind, count in others.items()
    )


def name(row: Row) -> str:
    """Return an architecture, and what its variant is, as in a table."""
    return f"`{row['architecture']}`" + (f", {row['variant']}" if row["variant"] else "")


def verdict(row: Row) -> str:
    """Return that an architecture is equal, and what is refused all the same."""
    return ", not with ".join(["equal", *row.get("without", ())])


def equal(found: Iterable[Row]) -> str:
    """Return the table of architectures that give the same tokens."""
    lines = []
    for row in found:
        if row["result"] == "equal":
            layers = sum(row["layers"].values())
            cells = (f"{row['compressed']} of {layers}", rest(row), verdict(row))
            lines.append((name(row), *cells))
    return table(("architecture", "layers compressed", "the rest", "transformers"), lines)


def listed(found: Sequence[Row], which: str) -> str:
    """Return architectures of one result, by what was said of them, without the model's name."""
    named = defaultdict[str, list[str]](list)
    for row in found:
        if row["result"] == which:
            said = row["said"].replace(row.get("model", "\0"), "the model")
            named[said].append(name(row))
    lines = [
        (", ".join(names), said.replace("|", "\\|").replace("<", "&lt;"))
        for said, names in sorted(named.items(), key=lambda each: (-len(each[1]), each[0]))
    ]
    return table(("architecture", "what it says"), lines) if lines else "None."


def in_vllm() -> str:
    """Return the table of models that were run inside vLLM, by how a policy stores tokens."""
    by_model = defaultdict[str, dict[str, Row]](dict)
    for row in result("vllm_models")["rows"]:
        by_model[row["model"]][row["stored"]] = row
    lines = [
        (f"`{model}`", *(_said(stored[how]) for how in ("slots", "pages")))
        for model, stored in by_model.items()
    ]
    return table(("model", "one format for all tokens", "every other policy"), lines)


def _said(row: Row) -> str:
    if row["runs"]:
        return "equal" if row["equal"] else "differs"
    return "vLLM fails" if row["refused_by"] == "vLLM" else "refused"


def families(found: Iterable[Row]) -> str:
    """Return how many architectures are equal, and a table of families of which all are.

    Families are grouped by the layers that they have beside those of full attention. Those of which
    a model was run inside vLLM with the same tokens stand in the last column, too.
    """
    those = {
        row["architecture"]: row for row in found if row["result"] == "equal" and not row["variant"]
    }
    grouped = defaultdict[str, list[str]](list)
    for family, needed in FAMILIES.items():
        if {*needed} <= those.keys():
            grouped[kinds(those[each] for each in needed)].append(family)
    served = {row["model"] for row in result("vllm_models")["rows"] if row["equal"]}
    lines = [
        (kind, ", ".join(names), ", ".join(name for name in names if IN_VLLM.get(name) in served))
        for kind, names in grouped.items()
    ]
    text = (
        f"In transformers, {len(those)} architectures give the same tokens as with their own cache "
        "([all of them](docs/models.md)). These families are among them; tiny models of those in "
        "the last column were run inside vLLM, too. SmolLM2, of all other figures, is a Llama."
    )
    head = ("layers beside full attention", "families", "run inside vLLM")
    return f"{wrapped(text)}\n\n{table(head, lines)}"


def kinds(found: Iterable[Row]) -> str:
    """Return the kinds of layers that architectures have beside those of full attention."""
    others = (kind for row in found for kind in row["layers"] if kind not in (FULL, "dummy"))
    return ", ".join(sorted({REST.get(kind, kind.replace("_", " ")) for kind in others})) or "none"


def wrapped(text: str) -> str:
    """Break a paragraph into lines."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def written(page: str) -> str:
    """Return a page with the blocks that the result gives."""
    found = rows()

    def block(match: re.Match[str]) -> str:
        which = match[1]
        if which == "families":
            text = families(found)
        elif which == "equal":
            text = equal(found)
        elif which == "vllm":
            text = in_vllm()
        else:
            text = listed(found, which)
        return f"<!-- models: {which} -->\n\n{text}\n\n<!-- end of models -->"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    from kv_policy.files import write_whole

    for path in (PAGE, README):
        before = path.read_text()
        after = written(before)
        if after != before:
            write_whole(path, after.encode())
            print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
