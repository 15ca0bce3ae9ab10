"""Check that a calibrated policy is used with the model it was calibrated with."""

from pathlib import Path
from typing import TYPE_CHECKING

from kv_transformers.models.folder import fingerprint
from kv_transformers.models.source import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kv_policy import KVPolicy


class WrongModelError(ValueError):
    """The policy was calibrated with another model."""


def check_fitted(model: "PreTrainedModel", policy: "KVPolicy") -> None:
    """Raise if a policy was calibrated with another model, or if that cannot be checked.

    Raises:
        WrongModelError: the fingerprints differ, or the model was not loaded from files.
    """
    if policy.fitted_to is not None:
        expect_fitted(policy, fingerprint_of(model))


def expect_fitted(policy: "KVPolicy", found: str | None) -> None:
    """Raise if a policy was calibrated with a model of another fingerprint.

    Raises:
        WrongModelError: the fingerprints differ, or `found` is None.
    """
    wanted = policy.fitted_to
    if wanted is None:
        return
    if found is None:
        raise WrongModelError(
            f"{policy} was calibrated with the model {wanted}, but this one was not loaded from a "
            "folder that can be compared; load it with kv_transformers.models.load_model or "
            "from_pretrained"
        )
    if found != wanted:
        raise WrongModelError(
            f"{policy} was calibrated with the model {wanted}, but this one is {found}; calibrate "
            "for this model; `kv-serve calibrate --help` lists the policies that need it"
        )


def fingerprint_of(model: "PreTrainedModel") -> str | None:
    """Return the fingerprint of the files a model was loaded from; None if none are found."""
    return fingerprint_at(model.config.name_or_path)


def fingerprint_at(name: str | None) -> str | None:
    """Return the fingerprint of a folder or of a cached hub model; None if it is not found."""
    if not name:
        return None
    try:
        folder = Path(name) if Path(name).is_dir() else _snapshot(name)
        return None if folder is None else fingerprint(folder)
    except (ModelError, OSError):  # a name too long for a folder raises OSError
        return None


def _snapshot(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
