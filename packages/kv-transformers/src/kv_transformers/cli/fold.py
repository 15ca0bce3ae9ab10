"""`kv-serve fold`: write a checkpoint with a policy's value basis in its weights."""

from pathlib import Path
from typing import Annotated

import typer

from kv_transformers.cli.console import err, refusing, remark
from kv_transformers.cli.options import reading_policy


def fold(
    model: Annotated[str, typer.Argument(help="The model, as for --model of other commands.")],
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="A policy with the basis of zack, for example zack:file=found.safetensors,"
            "keep=75%; any share that is kept, and any format, can be served later.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The folder to write, which must be new or empty."),
    ],
) -> None:
    """Write a checkpoint that computes values in the basis of zack, so that caches only truncate.

    It has the shapes of the model and computes the same, in any engine. Under `zack` with the same
    file, values are no longer rotated for each token.
    """
    with reading_policy(model):
        from kv_policy import parse

        read = parse(policy)
    from kv_transformers.checkpoint import expect_free, write_folded
    from kv_transformers.models import ModelError

    with refusing(ModelError):
        expect_free(out)
    with refusing(ModelError, ValueError), err().status("reading the model") as status:
        mark = write_folded(model, read, out, progress=status.update)
    remark(
        f"{out} holds the value basis {mark.basis}; under {policy}, and any other share that is "
        "kept, its values are only truncated"
    )
