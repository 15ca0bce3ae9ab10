"""`kv-serve capacity`: how many requests fit into a memory, for any model's configuration."""

import re
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kv_transformers.cli.console import err, out, refuse, refusing, remark
from kv_transformers.cli.options import Dtype, DtypeOption, reading_policy

if TYPE_CHECKING:
    from kv_transformers.capacity import Capacity, ModelMemory

POLICIES: Final = (
    "k8v4",
    "k4v4",
    "leankv",
    "kv-compress:keep=50%+k8v4",
    "kv-compress:keep=25%+k8v4",
    "kv-compress:keep=12.5%+k8v4",
)
CONTEXT: Final = 32_768
ContextOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Tokens of a request; by default {CONTEXT:,}, or the model's maximum if less.",
        show_default=False,
    ),
]
POWERS: Final = " kmgt"
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def capacity(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A name on the model hub, a local folder, a config.json, a .gguf file or "
            "package:NAME; by default SmolLM2-135M-Instruct. No weights are read.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option(help="Memory for keys and values, for example 24GiB.")
    ] = "16GiB",
    context: ContextOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="A policy; may be repeated. By default, several."),
    ] = None,
    dtype: DtypeOption = Dtype.AUTO,
) -> None:
    """Show how many requests and tokens fit into a memory, under several policies.

    The model is built from its configuration alone.
    """
    room = nbytes(memory)
    with reading_policy(model):
        from kv_policy import parse

        parts = {spec: parse(spec) for spec in policy or POLICIES}
    name, found, tokens = model_memory(model, dtype, context)
    rows = {"uncompressed": found.stock(tokens)}
    with reading_policy(model):
        rows |= {spec: found.under(part, tokens) for spec, part in parts.items()}
    _show(found, rows, room, tokens, name)


def model_memory(
    model: str | None, dtype: Dtype, context: int | None
) -> "tuple[str, ModelMemory, int]":
    """Read a model's configuration; return its class, its memory, and the tokens of a request."""
    from kv_transformers import models
    from kv_transformers.capacity import ModelMemory
    from kv_transformers.models.config import weightless_model

    with refusing(ValueError, models.ModelError), err().status("reading the configuration") as line:
        built = weightless_model(model, dtype.value, progress=line.update)
        found = ModelMemory.of(built)
    config = built.config.get_text_config(decoder=True)
    tokens = context or min(CONTEXT, getattr(config, "max_position_embeddings", CONTEXT))
    return type(built).__name__, found, tokens


def nbytes(text: str, option: str = "--memory") -> int:
    """Read a number of bytes, such as 24GiB; exit with an error if it is none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        refuse(f"{option} {text!r} is not a size; give a number and a unit, for example 24GiB")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** POWERS.index(prefix.lower() or " "))


def _show(
    found: "ModelMemory", rows: "dict[str, Capacity]", room: int, tokens: int, name: str
) -> None:
    from rich.markup import escape
    from rich.table import Table

    shape = found.shape
    out().print(
        f"{name}: {shape.layers} layers of full attention, {shape.kv_heads} KV heads of "
        f"{shape.key_dim}, {str(shape.dtype).removeprefix('torch.')}; weights "
        f"{size(found.weight_bytes)}",
        highlight=False,
        soft_wrap=True,
    )
    out().print(
        f"{size(room)} for keys and values, requests of {tokens:,} tokens",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("policy")
    for head in ("bytes a token", "a request", "its prefill", "requests", "tokens", "factor"):
        table.add_column(head, justify="right")
    stock = next(iter(rows.values()))
    for spec, each in rows.items():
        table.add_row(
            escape(spec),
            f"{each.token_bytes:,.0f}",
            size(each.request_bytes),
            size(each.least_bytes),
            f"{each.requests(room):,}",
            f"{each.tokens(room):,}",
            f"{stock.token_bytes / each.token_bytes:.2f}",
        )
    out().print(table)
    if found.windows:
        remark(
            f"{len(found.windows)} layers hold a window of tokens; they are counted, and not "
            "compressed."
        )
    if found.states:
        remark(f"{found.states} layers keep a state of fixed size, which is not counted.")
    remark(
        "Requests are those that fit while one of them is prefilled. Pages are counted as a "
        "scheduler reserves them; activations and block tables are not."
    )


def size(count: int) -> str:
    """Write a number of bytes with a binary unit."""
    power = min((max(1, count).bit_length() - 1) // 10, len(POWERS) - 1)
    prefix = f"{POWERS[power].upper()}i" if power else ""
    return f"{count / 1024**power:.4g} {prefix}B"
