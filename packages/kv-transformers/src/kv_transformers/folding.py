"""Folding a policy's basis into a model that nobody else uses meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kv_policy import parse
from kv_serve.evaluate.specs import FULL

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def folded(model: "PreTrainedModel", spec: str) -> Iterator[str | None]:
    """Fold the basis of a policy's text form, if it has one, for the length of a `with` block.

    Gives None, or a sentence that says why the basis cannot be folded into this model. Then the
    policy's cache turns the output back itself.

    Raises:
        ValueError: `parse` refuses the policy, it was calibrated with another model, or the model
            is folded already.
    """
    policy = None if spec == FULL else parse(spec)
    if policy is None or policy.basis is None:
        yield None
        return
    from kv_serve.hf.fold import Fold
    from kv_serve.hf.support import UnsupportedModelError

    fold, reason = None, None
    try:
        fold = Fold(model, policy)
    except UnsupportedModelError as error:
        reason = str(error)
    try:
        yield reason
    finally:
        if fold is not None:
            fold.restore()
