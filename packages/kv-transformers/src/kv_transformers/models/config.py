"""A model's configuration, and the model without its weights."""

from pathlib import Path
from typing import TYPE_CHECKING

from kv_transformers.models.convert import converted_folder
from kv_transformers.models.quiet import quiet
from kv_transformers.models.source import ModelError, Progress, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def weightless_model(
    name: str | None = None, dtype: str = "auto", *, progress: Progress | None = None
) -> "PreTrainedModel":
    """Build a causal language model on the meta device from its configuration; no weight is read.

    Args:
        name: as for `resolve_model`, or the path of a `config.json`. Of a hub model only the
            configuration is downloaded.
        dtype: `auto` (as the configuration says, or bfloat16 if it does not), `bfloat16`, `float16`
            or `float32`.
        progress: called with each step; None: silent.

    Raises:
        ModelError: there is no such model or configuration, or the installed transformers does not
            have its architecture as a causal language model.
    """
    place = _place(name, progress)
    with quiet():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(place, trust_remote_code=False)
            given = getattr(config.get_text_config(decoder=True), "dtype", None)
            wanted = getattr(torch, dtype) if dtype != "auto" else given or torch.bfloat16
            with torch.device("meta"):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(
                    config, dtype=wanted, trust_remote_code=False
                )
            return model
        except Exception as error:  # the errors of an invalid config are undocumented
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"no causal language model can be built from the configuration of {name or place} "
                f"({type(error).__name__}: {first}); name a folder or a config.json of a model "
                "whose architecture the installed transformers has"
            ) from error


def _place(name: str | None, progress: Progress | None) -> str:
    """Return what transformers finds a configuration by: a file, a folder or a name of the hub."""
    if name is not None and Path(name).suffix == ".json":
        path = Path(name).expanduser()
        if not path.is_file():
            raise ModelError(f"file not found: {path}; name an existing config.json")
        return str(path)
    source = resolve_model(name)
    if source.kind == "gguf":
        return str(converted_folder(source, progress or _silent))
    return str(source.path) if source.path is not None else source.name


def _silent(line: str) -> None:
    del line
