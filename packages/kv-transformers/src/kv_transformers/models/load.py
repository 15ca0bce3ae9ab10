"""Load a model and its tokenizer by name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_transformers.models.convert import converted_folder
from kv_transformers.models.folder import fingerprint, weight_files
from kv_transformers.models.quiet import quiet
from kv_transformers.models.source import (
    DEFAULT_MODEL,
    ModelError,
    Progress,
    Source,
    resolve_model,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "bfloat16", "float16", "float32")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_HUB_LEAVE = ("*/*", "consolidated*")  # copies in other formats


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to generate, with the identity that reports need.

    Attributes:
        model: In evaluation mode, on its device.
        tokenizer: With its chat template, if it has one.
        name: The requested name.
        fingerprint: 16 hexadecimal digits; equal for equal weights, config and tokenizer.
        folder: The folder it was loaded from, which other hosts can also serve.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    name: str
    fingerprint: str
    folder: Path


def load_model(
    name: str | None = None,
    dtype: "str | torch.dtype" = "auto",
    device: "str | torch.device | None" = None,
    *,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        name: As for `resolve_model`.
        dtype: `auto` (as the weights are stored), `bfloat16`, `float16`, `float32`, or a torch
            dtype.
        device: A torch device; by default the first GPU if there is one, else the CPU.
        progress: Called with each step; None: silent.

    Raises:
        ModelError: the model cannot be found, downloaded, converted or read, or dtype or device
            are unknown.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    source = resolve_model(name)
    folder = _folder(source, progress)
    say = progress or _silent
    say(f"loading {source.name}")
    with quiet():
        import torch
        from transformers import AutoTokenizer

        target = _device(device)
        with _loading(source.name, folder):
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        model: Any = load_weights(folder, source.name, dtype)  # whose `to` takes a model alone
        try:
            model = model.to(target)
        except torch.OutOfMemoryError as error:
            raise ModelError(f"{source.name} does not fit into the memory of {target}") from error
    return LoadedModel(model, tokenizer, source.name, fingerprint(folder), folder)


def load_weights(folder: Path, name: str, dtype: "str | torch.dtype" = "auto") -> "PreTrainedModel":
    """Load the causal language model of a folder onto the CPU, in evaluation mode.

    Args:
        folder: in the Hugging Face layout.
        name: of the model, for messages.
        dtype: as for `load_model`.

    Raises:
        ModelError: the folder cannot be loaded, or lacks weights.
    """
    with quiet():
        from transformers import AutoModelForCausalLM

        loader: Any = AutoModelForCausalLM  # its type hints lack `output_loading_info`
        with _loading(name, folder):
            model, info = loader.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{folder} lacks {len(missing)} of the model's weights, the first being"
            f" {missing[0]}; they would be random. Download the model again"
        )
    loaded: PreTrainedModel = model.eval()
    return loaded


@contextmanager
def _loading(name: str, folder: Path) -> Iterator[None]:
    """Report what transformers raises for a folder as a ModelError."""
    try:
        yield
    except Exception as error:  # the errors of an invalid config or tokenizer are undocumented
        if "trust_remote_code" in str(error):  # from transformers' own message
            raise ModelError(
                f"{name} can only be loaded by code in its folder, which kv-serve never"
                " runs; use a model of an architecture that the installed transformers has"
            ) from error
        raise ModelError(
            f"{name} cannot be loaded as a causal language model from {folder}"
            f" ({type(error).__name__}: {_first_line(error)})"
        ) from error


def model_folder(name: str | None = None, *, progress: Progress | None = None) -> Path:
    """Return a model's folder in the Hugging Face layout, downloaded or converted if needed.

    Args:
        name: As for `resolve_model`.
        progress: Called with each step; None: silent.

    Raises:
        ModelError: the model cannot be found, downloaded or converted, or its files are damaged.
    """
    return _folder(resolve_model(name), progress)


def _folder(source: Source, progress: Progress | None) -> Path:
    say = progress or _silent
    if source.kind == "gguf":
        return converted_folder(source, say)
    if source.kind == "folder":
        assert source.path is not None
        weight_files(source.path)
        return source.path
    folder = _download(source.name, say, bars=progress is not None)
    try:
        weight_files(folder)
    except ModelError as error:
        raise ModelError(
            f"the copy of {source.name} in the hub's cache cannot be used: {error}. If its download"
            " was interrupted, run the same command with a network connection to resume it"
        ) from error
    return folder


def _download(name: str, say: Progress, *, bars: bool) -> Path:
    from huggingface_hub import snapshot_download

    say(f"looking for {name} on the hub and in its cache")
    with quiet(hub_bars=bars):
        try:
            folder = snapshot_download(
                name, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_LEAVE)
            )
        except Exception as error:  # invalid names, permissions, network errors and others
            raise ModelError(
                f"{name} could not be downloaded from the Hugging Face hub"
                f" ({type(error).__name__}: {_first_line(error)}). Check the name and the"
                " network and run it again, which resumes an interrupted download; or name a local"
                f" folder, a .gguf file, or {DEFAULT_MODEL}, which needs no network once installed"
            ) from error
    return Path(os.fspath(folder))


def _device(device: "str | torch.device | None") -> "torch.device":
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device={str(device)!r} is not usable: {_first_line(error)}") from error
    return target


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def _silent(line: str) -> None:
    del line
