"""A calibrated policy works only with the model it was calibrated with."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from kv_evict import Profile
from kv_policy import Budget
from kv_transformers import CompressedCache
from kv_transformers.fitted import WrongModelError
from kv_transformers.models.folder import fingerprint


def profile(path: Path, model: str) -> str:
    Profile(
        model="tiny",
        fingerprint=model,
        high="raw",
        low="raw",
        t_high=0.1,
        t_low=0.0,
        max_loss=0.0,
        tasks=("needle",),
        length=64,
        bytes_ratio=1.0,
    ).save(path)
    return f"leankv:profile={path}"


def test_a_profile_of_the_same_files_is_taken(make, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    spec = profile(tmp_path / "found.json", fingerprint(tmp_path / "model"))
    assert CompressedCache(model, spec).policy.fitted_to == fingerprint(tmp_path / "model")


def test_a_profile_of_another_model_is_refused(make, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    spec = profile(tmp_path / "found.json", "0123456789abcdef")
    with pytest.raises(WrongModelError, match="calibrated with the model 0123456789abcdef, but"):
        CompressedCache(model, spec)


def test_a_model_without_files_cannot_be_compared(make, tmp_path: Path) -> None:
    spec = profile(tmp_path / "found.json", "0123456789abcdef")
    with pytest.raises(WrongModelError, match="not loaded from a folder"):
        CompressedCache(make(), spec)


def test_a_budget_has_no_meaning_where_a_rule_of_its_own_decides(make) -> None:
    with pytest.raises(ValueError, match="by its own rule, so a budget of 64 has no effect"):
        CompressedCache(make(), "leankv:high=raw,low=raw", budgets=[Budget(64)])
