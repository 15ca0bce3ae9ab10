"""`kv-serve compress`: compress a document once, to be asked many times."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from kv_transformers.cache_argument import passing
from kv_transformers.cli.console import check_writable, refuse, refusing, remark, writing
from kv_transformers.cli.options import (
    BackendOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    caches_by,
    expect_backend,
    load_model,
    reading_policy,
)
from kv_transformers.cli.prompts import around_document, longest, read_prompt


def compress(
    model: Annotated[str, typer.Argument(help="The model, as for --model of other commands.")],
    file: Annotated[Path, typer.Argument(help="A UTF-8 text; - reads standard input.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write, such as book.kv.")],
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="How the cache is compressed, for example expected-attention:keep=25%+k8v4; see "
            "`kv-serve policies`.",
        ),
    ] = "k8v4",
    private: Annotated[
        bool,
        typer.Option("--private", help="Write a hash of the token ids instead of the ids."),
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Read the text as it is, without a chat template.")
    ] = False,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    backend: BackendOption = "auto",
) -> None:
    """Read a document with a compressed cache, and write the cache to a file.

    `kv-serve generate --document FILE.kv "QUESTION"` answers from it without reading the document.
    """
    text = read_prompt(file).strip()
    if not text:
        refuse(f"the document {file} is empty; name a file with text")
    from kv_transformers.from_text import FULL, folded, read_spec

    with reading_policy(model):
        spec = read_spec(policy)
    if spec == FULL:
        refuse(f"`{FULL}` is transformers' own cache, which is not written; `raw` keeps every bit")
    expect_backend(backend)
    check_writable(out, "--out")
    loaded = load_model(model, dtype, device)
    make, _ = caches_by(loaded, backend)
    if not raw:
        text = around_document(loaded)[0] + text
    import torch

    from kv_transformers.cache import CompressedCache

    ids = torch.tensor([loaded.tokenizer.encode(text, add_special_tokens=raw)])
    limit = longest(loaded)
    if limit is not None and ids.shape[1] >= limit:
        refuse(
            f"the document has {ids.shape[1]:,} tokens, and the model {loaded.name} supports "
            f"{limit:,} with those of an answer; shorten the document"
        )
    with ExitStack() as stack:
        with refusing(ValueError):
            reason = stack.enter_context(folded(loaded.model, spec))
            cache = make(loaded.model, spec)
            assert isinstance(cache, CompressedCache)  # the text is a policy's
        if reason is not None:
            remark(f"The basis is not folded into the model: {reason}")
        with torch.no_grad(), refusing(ValueError):
            on_device = ids.to(loaded.model.device)
            loaded.model(on_device, logits_to_keep=1, **passing(loaded.model, cache))
        with writing(out), refusing(ValueError):
            cache.save(out, ids, private=private, chat=not raw)
    report = cache.memory()
    remark(
        f"{spec}: {ids.shape[1]:,} tokens in {out.stat().st_size:,} bytes of {out}; an "
        f"uncompressed cache has {report.full_bytes:,}"
    )
