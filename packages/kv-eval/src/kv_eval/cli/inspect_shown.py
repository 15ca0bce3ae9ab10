"""Output of `kv-serve inspect`: the text with shaded tokens, or a table of them, and totals."""

from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.style import Style
from rich.table import Table
from rich.text import Text

from kv_eval.inspection.record import LEVELS, Inspection, Token, level
from kv_transformers.cli.console import out

SHADES: Final = (  # of tokens by the share of heads that keep them
    ("no head", "dim"),
    ("under a third", "#1b1f24 on #d5f1ed"),
    ("under two thirds", "#1b1f24 on #93d8cd"),
    ("under all", "#1b1f24 on #4bb3a5"),
    ("all heads", "bold #ffffff on #0b6b63"),
)
HEADS: Final = 16  # maximum columns of a table
_BREAK: Final = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n"
_STRANGE: Final = "\N{REPLACEMENT CHARACTER}"


def show(found: Inspection, place: int | None = None) -> None:
    """Print the inspection; tokens by the heads that hold them, optionally in one place.

    Args:
        found: the inspection.
        place: index in `found.places`; None: any.
    """
    console = out()
    title = f"{found.policy} on {found.model}: {len(found.tokens):,} tokens"
    _say(console, f"{title}, {found.layers:,} layers of {found.heads:,} KV heads")
    console.print()
    held = "kept" if place is None else f"held as {found.places[place].name}"
    if console.is_terminal and console.color_system is not None and not console.no_color:
        console.print(_legend(held))
        console.print(shaded(found, place))
    else:
        console.print(_tokens(found, held, place))
    console.print()
    console.print(_places(found))
    _say(console, f"{found.ratio:.3f} of the bytes of an uncompressed cache")
    console.print()
    console.print(_layers(found, console))


def shade(share: float) -> int:
    """Return the index in `SHADES` for a share of heads."""
    if share in (0.0, 1.0):
        return len(SHADES) - 1 if share else 0
    return 1 + int(3 * share)


def shaded(found: Inspection, place: int | None = None) -> Text:
    """Return the prompt, each token shaded by the share of heads that hold it."""
    written = Text()
    for token in found.tokens:
        style = Style.parse(SHADES[shade(found.share(token, place))][1])
        for i, piece in enumerate(token.shown.split("\n")):
            if i:
                written.append(_BREAK, style)
            written.append(_printable(piece), style)
    return written


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _printable(piece: str) -> str:
    """Replace characters that a terminal would interpret."""
    return "".join(c if c.isprintable() or c == "\t" else _STRANGE for c in piece)


def _legend(held: str) -> Text:
    written = Text(f"{held} by  ")
    for name, style in SHADES:
        written.append(f" {name} ", style)
        written.append("  ")
    return written


def _tokens(found: Inspection, held: str, place: int | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("token", justify="right")
    table.add_column("text", overflow="fold")
    table.add_column(f"{escape(held)} by", no_wrap=True)
    table.add_column("heads", justify="right")
    for each in found.places:
        table.add_column(escape(each.name), justify="right")
    for i, token in enumerate(found.tokens):
        share = found.share(token, place)
        shares = _shares(found, token, share)
        table.add_row(f"{i:,}", escape(repr(token.shown)), _bar(share), *shares)
    return table


def _bar(share: float) -> str:
    filled = level(share)
    return "#" * filled + "-" * (LEVELS - filled)


def _shares(found: Inspection, token: Token, first: float) -> list[str]:
    each = [found.share(token, place) for place in range(len(found.places))]
    return [f"{share:.1%}" for share in (first, *each)]


def _places(found: Inspection) -> Table:
    every = found.all_heads * len(found.tokens)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("held as")
    for name in ("tokens per head", "of all", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)

    def add(name: str, tokens: int, nbytes: str) -> None:
        mean, share = f"{tokens / found.all_heads:,.1f}", f"{tokens / every:.1%}"
        table.add_row(escape(name), mean, share, nbytes)

    for place in found.places:
        add(place.name, place.tokens, f"{place.bytes:,}")
    add("not kept", found.missing, "")
    for words, nbytes in found.beside.items():
        table.add_row(words, "", "", f"{nbytes:,}")
    add("held in all", every - found.missing, f"{found.kv_bytes:,}")
    add("an uncompressed cache", every, f"{found.full_bytes:,}")
    return table


def _layers(found: Inspection, console: Console) -> Table:
    """Return the tokens kept per layer: of each head, or minimum, mean and maximum of many."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="tokens kept", title_justify="left")
    table.add_column("layer", justify="right")
    wide = found.heads > min(HEADS, (console.width - 7) // 9)
    names = ["least", "mean", "most"] if wide else [f"head {i}" for i in range(found.heads)]
    for name in names:
        table.add_column(name, justify="right")
    for layer, heads in enumerate(found.kept):
        row = [f"{count:,}" for count in heads]
        if wide:
            row = [f"{min(heads):,}", f"{sum(heads) / len(heads):,.1f}", f"{max(heads):,}"]
        table.add_row(str(layer), *row)
    return table
