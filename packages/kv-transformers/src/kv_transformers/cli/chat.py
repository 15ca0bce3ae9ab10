"""`kv-serve chat`: talk with a model whose turns stay in a compressed cache."""

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kv_transformers.cli.console import err, out, refuse, refusing, remark
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
    sampling,
)
from kv_transformers.cli.prompts import longest
from kv_transformers.cli.streaming import TimedStreamer

if TYPE_CHECKING:
    from kv_transformers.conversation import Conversation
    from kv_transformers.from_text import MakeCache

HELP: Final = {
    "/policy SPEC": "change the policy; the turns are read again with the next message",
    "/memory": "show the bytes that the cache holds",
    "/reset": "forget all turns",
    "/help": "show these commands",
    "/exit": "leave; so does the end of the input",
}


def chat(
    model: ModelOption = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="How the cache is compressed, for example kv-compress:keep=25%+k8v4; "
            "`full` for transformers' own cache.",
        ),
    ] = "k8v4",
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens of an answer.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 is greedy decoding.")
    ] = 0.0,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    backend: BackendOption = "auto",
) -> None:
    """Talk with a model; all turns stay in one compressed cache.

    A turn reads only what is new. /help lists the commands; Ctrl-C ends an answer.
    """
    from kv_transformers.conversation import Conversation
    from kv_transformers.from_text import read_spec

    with reading_policy(model):
        spec = read_spec(policy)
    expect_backend(backend)
    loaded = load_model(model, dtype, device)
    if not loaded.tokenizer.chat_template:
        refuse(f"the model {loaded.name} has no chat template; use `kv-serve generate --raw`")
    make, _ = caches_by(loaded, backend)
    with refusing(ValueError):
        make(loaded.model, spec)  # so that a policy that does not fit is refused at once
    talk = Conversation(loaded, partial(make, loaded.model, spec))
    options = {"max_new_tokens": max_new_tokens, **sampling(temperature)}
    remark(f"{loaded.name} under {spec}; /help lists commands")
    for line in _lines():
        if not line.startswith("/"):
            _turn(talk, line, options)
        elif line == "/exit":
            return
        else:
            _command(talk, line, make)


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty, without space around them."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (editing and history in `input`)
    while True:
        try:
            line = (input("> ") if sys.stdin.isatty() else input()).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            err().print()
            return
        if line:
            yield line


def _turn(talk: "Conversation", message: str, options: Mapping[str, Any]) -> None:
    """Print the answer to a message as it is generated."""
    limit, new = longest(talk.loaded), options["max_new_tokens"]
    count = len(talk.next_ids(message))
    if limit is not None and count + new > limit:
        remark(
            f"the turns have {count:,} tokens with this message, and an answer may have {new:,}; "
            f"the model supports {limit:,} in total: shorten the message, or begin anew with /reset"
        )
        return
    streamer = TimedStreamer(talk.loaded.tokenizer)
    try:
        with _stopping() as stop:
            talk.answer(message, {**options, "streamer": streamer, "stopping_criteria": [stop]})
    except ValueError as error:
        remark(f"Error: {error}")


@contextmanager
def _stopping() -> Iterator[Callable[..., Any]]:
    """Yield a stopping criterion that Ctrl-C sets, so that the cache ends on a whole token."""
    import torch

    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    def criterion(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.full((len(ids),), stopped, device=ids.device)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield criterion
    finally:
        signal.signal(signal.SIGINT, before)


def _command(talk: "Conversation", line: str, make: "MakeCache") -> None:
    name, _, rest = line.partition(" ")
    if name == "/policy" and rest:
        _change(talk, rest.strip(), make)
    elif name == "/memory":
        out().print("no tokens yet" if talk.cache is None else repr(_held(talk)), highlight=False)
    elif name == "/reset":
        talk.clear()
    else:
        if name != "/help":
            remark(f"unknown command {line!r}")
        for command, what in HELP.items():
            out().print(f"{command:14} {what}", highlight=False)


def _held(talk: "Conversation") -> object:
    from kv_transformers.cache import CompressedCache
    from kv_transformers.from_text import held

    assert talk.cache is not None
    if isinstance(talk.cache, CompressedCache):
        return talk.cache.memory()
    return held(talk.cache)


def _change(talk: "Conversation", spec: str, make: "MakeCache") -> None:
    from kv_policy import NotCalibratedError
    from kv_transformers.from_text import read_spec

    try:
        spec = read_spec(spec)
        make(talk.loaded.model, spec)
    except NotCalibratedError as error:
        remark(f"Error: {error.advice(talk.loaded.name)}")
    except ValueError as error:
        remark(f"Error: {error}")
    else:
        talk.renew(partial(make, talk.loaded.model, spec))
        remark(f"the turns are read again under {spec} with the next message")
