"""Reading a few tokens before and after a model is changed, to see that it still says the same."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kv_policy import Basis, Capabilities
from kv_serve.hf.support import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS: Final = 7


@dataclass(frozen=True)
class _Bare:
    """A policy that is nothing but a basis."""

    basis: Basis
    selector: None = None
    formats: None = None
    fitted_to: None = None
    capabilities: Capabilities = field(default_factory=Capabilities)

    def __str__(self) -> str:
        """For messages."""
        return str(self.basis)


class Probe:
    """What a model gives for a few tokens over a cache of a basis, before it is changed."""

    def __init__(self, model: "PreTrainedModel", basis: Basis) -> None:
        """Read the tokens."""
        self._model, self._policy = model, _Bare(basis)
        self._before = self._read()

    def check(self) -> None:
        """Read them again.

        Raises:
            UnsupportedModelError: the model gives something else, or fails.
        """
        try:
            after = self._read()
        except RuntimeError as error:
            raise UnsupportedModelError(f"{self._sentence}: {error}") from error
        far = float((after - self._before).abs().max() / self._before.abs().max())
        near = max(1e-3, 16 * torch.finfo(self._model.dtype).eps)
        if not far <= near:
            raise UnsupportedModelError(
                f"{self._sentence}: what it gives for a few tokens differs by {far:.1%}"
            )

    @property
    def _sentence(self) -> str:
        return (
            f"{type(self._model).__name__} does something between its projections that a basis "
            "does not go through, so it cannot be folded; use the policy's cache without folding"
        )

    def _read(self) -> Tensor:
        from kv_serve.hf.cache import CompressedCache

        model = self._model
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        ids = (torch.arange(TOKENS, device=model.device)[None] * 7 + 3) % vocabulary
        with torch.no_grad():
            out: Tensor = model(ids, past_key_values=CompressedCache(model, self._policy))[0]
        return out.double()
