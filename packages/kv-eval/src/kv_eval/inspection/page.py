"""The page of `kv-serve inspect`: the prompt with its kept tokens."""

from typing import Final

from kv_eval.inspection.record import LEVELS, Inspection, Token, level
from kv_eval.report.frame import Section, frame, own
from kv_eval.report.kept import kept_by
from kv_eval.report.markup import Markup, join, tag, text
from kv_eval.report.run import fact
from kv_eval.report.table import Cell, Column, number, table, word

TITLE: Final = "What was kept of a prompt"
KINDS: Final = 6  # colours of places, in the page's style
_BLANK: Final = "\N{NO-BREAK SPACE}"
_ABOUT: Final = (
    "The stronger the shade of a token, the more of the model's heads keep it, of all layers. A "
    "token that no head keeps has none, and its text is paler."
)
_KEPT: Final = (
    "Tokens of the prompt that are held: a row for each layer, a column for each of its KV heads. "
    "The stronger the colour, the more; the strongest is the most that one head keeps."
)
_BYTES: Final = (
    "Tokens are counted once for each head of each layer. The raw window takes its bytes whether "
    "it is full or not."
)


def page(found: Inspection) -> bytes:
    """Return the page as UTF-8.

    Without JavaScript it shows the mean over layers and heads, and every number; the script adds
    the choice of a layer and a head, and sorting.
    """
    sections = (
        Section("text", "The prompt", _text(found)),
        Section("kept", "Tokens kept", _kept(found)),
        Section("bytes", "Bytes", _bytes(found)),
        Section("run", "What was run", _run(found)),
    )
    style, script = (own("kv_eval.inspection", f"page.{kind}") for kind in ("css", "js"))
    return frame(TITLE, f"{found.policy} on {found.model}", sections, style=style, script=script)


def _text(found: Inspection) -> Markup:
    return join(
        tag("p", None, text(_ABOUT)),
        tag("div", {"id": "choice"}),
        _shades(),
        tag("ul", {"class": "key", "id": "places", "hidden": ""}, *_names(found)),
        tag(
            "div",
            {"id": "prompt"},
            *(_token(found, i, token) for i, token in enumerate(found.tokens)),
        ),
        tag(
            "details",
            None,
            tag("summary", None, text("All tokens, in a table")),
            _tokens(found),
        ),
    )


def _shades() -> Markup:
    """Return the legend of shades."""
    samples = (tag("span", {"class": f"t s{i}"}, text(_BLANK)) for i in range(0, LEVELS + 1, 2))
    return tag(
        "p",
        {"class": "shades", "id": "shades"},
        tag("span", None, text("kept by no head")),
        tag("span", {"class": "samples", "aria-hidden": "true"}, *samples),
        tag("span", None, text("by all")),
    )


def _names(found: Inspection) -> tuple[Markup, ...]:
    """Return the legend of places, shown with a single head."""

    def item(looks: str, name: Markup) -> Markup:
        sample = {"class": f"t {looks}", "aria-hidden": "true"}
        return tag("li", None, tag("span", sample, text(_BLANK)), name)

    places = (
        item(f"at k{i % KINDS}", tag("span", {"class": "place"}, text(place.name)))
        for i, place in enumerate(found.places)
    )
    return (*places, item("s0", tag("span", None, text("not kept"))))


def _token(found: Inspection, i: int, token: Token) -> Markup:
    lines = " n" if "\n" in token.text else ""
    silent = "" if token.text else " silent"
    return tag(
        "span",
        {
            "class": f"t s{level(found.share(token))}{lines}{silent}",
            "title": f"token {i}\n{found.facts(token)}",
        },
        text(token.shown),
    )


def _tokens(found: Inspection) -> Markup:
    columns = [Column("token"), Column("text", number=False), Column("kept by, % of heads")]
    columns += [Column(f"{place.name}, %") for place in found.places]
    rows = [
        [
            number(i, "d"),
            word(repr(token.shown)),
            _percent(sum(token.held), found.all_heads),
            *(_percent(count, found.all_heads) for count in token.held),
        ]
        for i, token in enumerate(found.tokens)
    ]
    return table("Tokens of the prompt", columns, rows)


def _percent(count: int, of: int) -> Cell:
    return number(100 * count / of, ".1f")


def _kept(found: Inspection) -> Markup:
    layers = tuple(tuple(float(count) for count in heads) for heads in found.kept)
    drawn = kept_by(found.policy, layers, form=",.0f", held=found.held)
    return join(tag("p", None, text(_KEPT)), drawn)


def _bytes(found: Inspection) -> Markup:
    every = found.all_heads * len(found.tokens)
    columns = [Column("held as", number=False), Column("tokens"), Column("% of tokens")]
    columns += [Column("per head"), Column("bytes")]

    def row(name: str, tokens: int | None, nbytes: int | None) -> list[Cell]:
        return [
            word(name),
            number(tokens, ",d"),
            number(None if tokens is None else 100 * tokens / every, ".1f"),
            number(None if tokens is None else tokens / found.all_heads, ",.1f"),
            number(nbytes, ",d"),
        ]

    rows = [row(place.name, place.tokens, place.bytes) for place in found.places]
    rows += [row("not kept", found.missing, None)]
    rows += [row(words, None, nbytes) for words, nbytes in found.beside.items()]
    rows += [row("held in all", every - found.missing, found.kv_bytes)]
    rows += [row("an uncompressed cache", every, found.full_bytes)]
    ratio = f"{found.ratio:.3f} of the full {found.full_bytes:,}"
    return tag(
        "article",
        None,
        tag("p", None, text(f"{found.kv_bytes:,} bytes are held, {ratio}.")),
        tag("p", {"class": "note"}, text(_BYTES)),
        table("Tokens and bytes by how they are held", columns, rows),
    )


def _run(found: Inspection) -> Markup:
    facts = {
        "model": found.model,
        "policy": found.policy,
        "attention": str(found.attention),
        "prompt": f"{len(found.tokens):,} tokens",
        "heads": f"{found.layers:,} layers of {found.heads:,}",
        "versions": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    }
    listed = tag("dl", None, *(fact(name, value) for name, value in facts.items()))
    return tag("article", None, listed)
