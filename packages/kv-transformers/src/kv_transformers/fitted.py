"""Check that a calibrated policy is used with the model it was calibrated with."""

from pathlib import Path
from typing import TYPE_CHECKING

from kv_transformers.models.folder import fingerprint
from kv_transformers.models.mark import FoldMark, mark_of
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
        expect_fitted(policy, fingerprint_of(model), mark_of(model.config))


def expect_fitted(policy: "KVPolicy", found: str | None, mark: FoldMark | None = None) -> None:
    """Raise if a policy was calibrated with a model of another fingerprint.

    A policy with a basis may have been calibrated with the model that a checkpoint was folded from.

    Args:
        policy: the policy.
        found: fingerprint of the model's files; None: unknown.
        mark: of a folded checkpoint.

    Raises:
        WrongModelError: the fingerprints differ, `found` is None, or a folded checkpoint has
            changed since it was written.
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
    if mark is not None and policy.basis is not None:
        if found != mark.model:
            raise WrongModelError(
                f"this model is marked as folded with the value basis {mark.basis}, but its files "
                f"are not those that were written: their fingerprint is {found}, not {mark.model}; "
                "fold it again with kv-serve fold, or remove the mark from its config.json"
            )
        found = wanted if wanted == found else mark.source
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
