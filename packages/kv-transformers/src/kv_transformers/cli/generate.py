"""`kv-serve generate`: generate text with a compressed cache."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kv_transformers.cache_argument import passing
from kv_transformers.cli.asking import open_documents, policy_of, question
from kv_transformers.cli.console import refuse, refusing, remark
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
from kv_transformers.cli.prompts import in_chat, longest, read_prompt
from kv_transformers.cli.streaming import TimedStreamer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache

    from kv_transformers.models import LoadedModel

DEFAULT: Final = "k8v4"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; it follows the text of --prompt-file.")
    ] = None,
    model: ModelOption = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="How the cache is compressed, for example snapkv:budget=1024+k8v4; "
            "`full` for transformers' own cache. See `kv-serve policies`. The default is k8v4, or "
            "that of --document.",
            show_default=False,
        ),
    ] = None,
    document: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of `kv-serve compress`; the prompt follows its text. Several are one "
            "after another, in the order given."
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 text placed before PROMPT; - reads standard input."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 is greedy decoding.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of sampling.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text without a chat template.")
    ] = False,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    backend: BackendOption = "auto",
) -> None:
    """Generate text with a compressed cache, and print the size of the cache.

    The text streams to standard output; bytes and times are printed to standard error.
    """
    text = _prompt(prompt, prompt_file)
    from kv_transformers.from_text import FULL, folded, read_spec

    if document and policy == FULL:
        refuse(f"--document is under a policy, and `{FULL}` is none; omit --policy")
    with reading_policy(model):
        spec = policy_of(document, policy) if document else read_spec(policy or DEFAULT)
    expect_backend(backend)
    loaded = load_model(model, dtype, device)
    make, served = caches_by(loaded, backend)
    if not document:
        tokens = _tokens(loaded, text, raw=raw)
        mask = tokens.new_ones(tokens.shape)
    with ExitStack() as stack:
        cache: "Cache"
        with refusing(ValueError):
            reason = stack.enter_context(folded(loaded.model, spec))
            if document:
                cache = opened = open_documents(document, loaded, served.backend)
                tokens, mask = question(loaded, opened, text, raw=raw)
            else:
                cache = make(loaded.model, spec)
        _check_length(loaded, tokens.shape[1], max_new_tokens)
        if reason is not None:
            remark(f"The basis is not folded into the model: {reason}")
        streamer = TimedStreamer(loaded.tokenizer)
        _stream(loaded, tokens, mask, cache, streamer, max_new_tokens, temperature, seed)
    remark(_summary(spec, cache, tokens.shape[1], streamer))


def _stream(
    loaded: "LoadedModel",
    tokens: "Tensor",
    mask: "Tensor",
    cache: "Cache",
    streamer: TimedStreamer,
    new: int,
    temperature: float,
    seed: int,
) -> None:
    import torch

    torch.manual_seed(seed)
    generator: Any = loaded.model  # its type hints require a subclass of BaseStreamer
    try:
        generator.generate(
            tokens,
            attention_mask=mask,
            **passing(generator, cache),
            max_new_tokens=new,
            streamer=streamer,
            **sampling(temperature),
        )
    except KeyboardInterrupt:
        print(flush=True)


def _prompt(prompt: str | None, file: Path | None) -> str:
    pieces = [] if file is None else [read_prompt(file)]
    pieces.append(prompt or "")
    text = "\n\n".join(piece.strip() for piece in pieces if piece.strip())
    if not text:
        refuse("the prompt is empty; give a text as PROMPT, or a file with --prompt-file")
    return text


def _tokens(loaded: "LoadedModel", text: str, *, raw: bool) -> "Tensor":
    import torch

    if not raw:
        text = in_chat(loaded, text, "continue the text as it is with --raw")
    ids = loaded.tokenizer.encode(text, add_special_tokens=raw)
    return torch.tensor([ids], device=loaded.model.device)


def _check_length(loaded: "LoadedModel", prompt: int, new: int) -> None:
    limit = longest(loaded)
    if limit is not None and prompt + new > limit:
        refuse(
            f"the prompt has {prompt:,} tokens and --max-new-tokens is {new:,}; the model "
            f"{loaded.name} supports {limit:,} in total; shorten the prompt or request fewer tokens"
        )


def _summary(spec: str, cache: "Cache", prompt: int, streamer: TimedStreamer) -> str:
    from kv_transformers.from_text import held

    size = held(cache)
    pieces = [
        f"{spec}: {size.kv_bytes:,} bytes of KV cache held, {size.ratio:.3f} of the full "
        f"{size.full_bytes:,}",
        f"{prompt:,} + {streamer.tokens:,} tokens",
    ]
    if streamer.token_ms is not None:
        pieces.append(f"{streamer.token_ms:.1f} ms per token")
    return "; ".join(pieces)
