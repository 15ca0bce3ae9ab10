"""`kv-serve recommend`: a policy for a model and a memory, and the command to type."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kv_transformers.cli.capacity import ContextOption, model_memory, nbytes
from kv_transformers.cli.console import check_writable, refuse, refusing
from kv_transformers.cli.options import BackendOption, DeviceOption, Dtype, DtypeOption

if TYPE_CHECKING:
    from kv_transformers.search import Search

MEMORY: Final = "16GiB"
LOSS: Final = 0.02  # nats per token: a perplexity two hundredths higher
LENGTH: Final = 2000
NOTHING: Final = 1  # exit status without a recommendation


def recommend(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A name on the model hub, a local folder, a config.json, a .gguf file or "
            "package:NAME; by default SmolLM2-135M-Instruct. No weights are read without "
            "--measure.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for keys and values of all requests, for example 24GiB; by default "
            f"{MEMORY}, or unlimited with --per-request.",
            show_default=False,
        ),
    ] = None,
    per_request: Annotated[
        str | None,
        typer.Option(help="Memory that one request may take, for example 500MiB."),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="How many requests must fit into --memory.")
    ] = 1,
    context: ContextOption = None,
    loss: Annotated[
        float, typer.Option(min=0, help="Loss at most, in nats per token over the full cache's.")
    ] = LOSS,
    later: Annotated[
        bool,
        typer.Option(
            "--later",
            help="Questions come after the prompt has been compressed, as with a document that is "
            "read once; by default they are inside the prompt.",
        ),
    ] = False,
    dtype: DtypeOption = Dtype.AUTO,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Search on this model itself, instead of going by figures of another. Needs the "
            "package kv-eval, and --json.",
        ),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(help="With --measure: output file; finished samples are kept beside it."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="With --measure: a UTF-8 text to read; by default Python's help topics."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="With --measure: policies to try instead of all that are installed, separated by "
            "commas; choices in braces expand to one policy each. May be repeated.",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=f"With --measure: tokens of a prompt; by default {LENGTH:,}, or --context.",
            show_default=False,
        ),
    ] = None,
    continuation: Annotated[
        int, typer.Option(min=1, help="With --measure: tokens scored after each prompt.")
    ] = 64,
    windows: Annotated[int, typer.Option(min=2, help="With --measure: prompts at most.")] = 32,
    numbers: Annotated[
        int,
        typer.Option(min=0, help="With --measure: hidden numbers in each of two tasks."),
    ] = 8,
    precision: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="With --measure: stop when the interval of the loss is this much or less to each "
            "side, in nats per token; by default half of --loss.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = None,
    backend: BackendOption = "auto",
) -> None:
    """Recommend a policy for a model, a memory and a loss, and print the command to type.

    By default it goes by figures that were measured on SmolLM2-135M-Instruct; the bytes are those
    of your model. With --measure it searches on your model and text; run the same command again to
    resume after an interruption. Exits with status 1 if there is no policy to recommend.
    """
    from kv_transformers.recommend import Wish

    if memory is None and per_request is None:
        memory = MEMORY
    room = None if memory is None else nbytes(memory)
    each = None if per_request is None else nbytes(per_request, "--per-request")
    if room is None and requests > 1:
        refuse("--requests is of --memory; give the memory of all requests, for example 24GiB")
    if not measure and (json or text or policy or length or precision is not None):
        refuse(
            "--json, --text, --policy, --length and --precision are for --measure; add it, or omit "
            "them"
        )
    search = _search(json) if measure else None
    _, found, tokens = model_memory(model, dtype, context)
    wish = Wish(tokens, room, requests, each, loss, later)
    if search is not None:
        from kv_transformers.search import SearchOptions

        assert json is not None
        options = SearchOptions(
            model=model,
            dtype=dtype.value,
            device=device,
            backend=backend,
            wish=wish,
            policies=tuple(policy or ()),
            text=text,
            length=length or min(LENGTH, tokens),
            continuation=continuation,
            windows=windows,
            numbers=numbers,
            precision=loss / 2 if precision is None else precision,
            json=json,
        )
        search(options)
        return
    from kv_transformers.cli.recommended import show
    from kv_transformers.measured import measured
    from kv_transformers.recommend import choose

    every = measured()
    choice = choose(found, every, wish)
    show(choice, every, model)
    if choice.best is None:
        raise typer.Exit(NOTHING)


def _search(json: Path | None) -> "Search":
    """Return the search of an installed package; exit with an error if there is none."""
    from kv_policy.installing import install_command
    from kv_transformers.search import PACKAGE, installed

    with refusing(ValueError, TypeError):
        search = installed()
    if search is None:
        refuse(
            f"--measure is in the package {PACKAGE}, which is not installed: "
            f"`{install_command(PACKAGE)}`"
        )
    if json is None:
        refuse("--measure needs --json FILE, from which an interrupted search resumes")
    check_writable(json)
    return search
