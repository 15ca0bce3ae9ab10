"""`kv-serve inspect`: the tokens of a prompt that a policy keeps."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kv_eval.cli.targets import expect_apart, write_all
from kv_eval.extras import undrawable
from kv_transformers.cli.console import check_writable, err, refuse, refusing, remark
from kv_transformers.cli.options import (
    BackendOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    ModelOption,
    caches_by,
    expect_backend,
    load_model,
    reading_policy,
)
from kv_transformers.cli.prompts import in_chat, longest, read_prompt

if TYPE_CHECKING:
    from kv_eval.inspection.prompt import Piece
    from kv_eval.inspection.record import Inspection
    from kv_transformers.models import LoadedModel


def inspect(
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="Compression of the cache, for example snapkv:budget=64,window=16+k8v4. See "
            "`kv-serve policies`.",
        ),
    ],
    prompt: Annotated[
        str | None, typer.Argument(help="The text that the model reads, unmodified.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 text to read instead of PROMPT; - reads standard input."),
    ] = None,
    model: ModelOption = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Apply the chat template to the text, as generate does."),
    ] = False,
    place: Annotated[
        str | None,
        typer.Option(
            help="Count the heads that hold a token in this place, such as k8v4 or `raw window`, "
            "instead of those that hold it at all."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Output file of the numbers.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Output file of a page with a choice of layer and head.")
    ] = None,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    backend: BackendOption = "auto",
) -> None:
    """Show which tokens of a prompt a policy keeps, and in which format, over the text.

    The model reads the prompt once with a compressed cache. In a terminal with colours, tokens are
    shaded by how many heads keep them; in a pipe or a file the output is a table of tokens.
    """
    text = _text(prompt, file)
    spec = _spec(policy, model)
    targets = {"--json": json, "--html": html}
    named = {option: path for option, path in targets.items() if path is not None}
    expect_apart([] if file is None else [file], "the prompt", named)
    for option, path in named.items():
        check_writable(path, option)
    if html is not None and (reason := undrawable("--html")) is not None:
        refuse(reason)
    expect_backend(backend)
    loaded = load_model(model, dtype, device)
    if chat:
        text = in_chat(loaded, text, "read the text as it is, without --chat")
    from kv_eval.inspection.prompt import pieces

    tokens = pieces(loaded.tokenizer, text, special=not chat)
    _check_length(loaded, len(tokens))
    found = _inspected(loaded, spec, tokens, backend)
    from kv_eval.cli.inspect_shown import show

    shaded = None if place is None else _place(found, place)
    made = [] if json is None else [(json, found.encoded())]
    if html is not None:
        from kv_eval.inspection.page import page

        made.append((html, page(found)))
    write_all(made)  # before any output: a reader such as `head` may close the pipe
    show(found, shaded)


def _inspected(
    loaded: "LoadedModel", spec: str, tokens: "Sequence[Piece]", backend: str
) -> "Inspection":
    from kv_eval.inspection.look import inspected
    from kv_transformers import CompressedCache
    from kv_transformers.from_text import folded

    _, served = caches_by(loaded, backend)
    with ExitStack() as stack:
        with refusing(ValueError):
            reason = stack.enter_context(folded(loaded.model, spec))
            cache = CompressedCache(
                loaded.model, spec, backend=served.backend, tokenizer=loaded.tokenizer
            )
        if reason is not None:
            remark(f"The basis is not folded into the model: {reason}")
        with err().status(f"reading {len(tokens):,} tokens"):
            found = inspected(loaded, cache, tokens, served)
    return found


def _text(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        refuse(f"PROMPT and --file {file} are both given; use one of them")
    text = (prompt or "") if file is None else read_prompt(file)
    if not text.strip():
        refuse("the prompt is empty; pass a text as PROMPT, or a file with --file")
    return text


def _place(found: "Inspection", name: str) -> int:
    names = [place.name for place in found.places]
    if name not in names:
        refuse(f"the policy {found.policy} has no place {name!r}; its places: {', '.join(names)}")
    return names.index(name)


def _spec(policy: str, model: str | None) -> str:
    from kv_policy import parse
    from kv_transformers.from_text import FULL

    if policy.strip() == FULL:
        refuse(
            f"`{FULL}` is transformers' own cache: every head keeps every token unchanged, so no "
            "token is dropped; name a policy, such as k8v4 or snapkv:budget=64,window=16"
        )
    with reading_policy(model):
        return str(parse(policy))


def _check_length(loaded: "LoadedModel", tokens: int) -> None:
    limit = longest(loaded)
    if not tokens:
        refuse(f"the tokenizer of {loaded.name} finds no token in the prompt; use another text")
    if limit is not None and tokens > limit:
        refuse(
            f"the prompt has {tokens:,} tokens and the model {loaded.name} reads {limit:,}; use a "
            "shorter one"
        )
