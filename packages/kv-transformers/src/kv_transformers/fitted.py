"""Which model an object in memory is, for policies that were calibrated with one."""

from pathlib import Path
from typing import TYPE_CHECKING

from kv_transformers.models.folder import fingerprint
from kv_transformers.models.source import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kv_policy import KVPolicy


class WrongModelError(ValueError):
    """A policy was calibrated with another model than it is used with."""


def check_fitted(model: "PreTrainedModel", policy: "KVPolicy") -> None:
    """Refuse a policy that was calibrated with another model, or with one that nobody can tell.

    Raises:
        WrongModelError: the fingerprints differ, or the model was not loaded from files.
    """
    if policy.fitted_to is not None:
        expect_fitted(policy, fingerprint_of(model))


def expect_fitted(policy: "KVPolicy", found: str | None) -> None:
    """Refuse a policy that was calibrated with another model than the one of this fingerprint.

    Raises:
        WrongModelError: the fingerprints differ, or there is none to compare.
    """
    wanted = policy.fitted_to
    if wanted is None:
        return
    if found is None:
        raise WrongModelError(
            f"{policy} was calibrated with the model {wanted}, and this one was not loaded from a "
            "folder that could be compared; load it with kv_transformers.models.load_model or "
            "from_pretrained"
        )
    if found != wanted:
        raise WrongModelError(
            f"{policy} was calibrated with the model {wanted} and this one is {found}; calibrate "
            "for this model; `kv-serve calibrate --help` lists what is calibrated"
        )


def fingerprint_of(model: "PreTrainedModel") -> str | None:
    """Fingerprint of the files a model was loaded from; None if there are none to be found."""
    return fingerprint_at(model.config.name_or_path)


def fingerprint_at(name: str | None) -> str | None:
    """Fingerprint of the files in a folder, or of a model of the hub; None if none are found."""
    if not name:
        return None
    try:
        folder = Path(name) if Path(name).is_dir() else _snapshot(name)
        return None if folder is None else fingerprint(folder)
    except (ModelError, OSError):  # a name too long for a folder's is an OSError
        return None


def _snapshot(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
