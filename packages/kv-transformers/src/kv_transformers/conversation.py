"""A conversation whose turns are read once, into one cache."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_transformers.cache_argument import passing

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache

    from kv_transformers.models import LoadedModel


@dataclass(slots=True)
class Conversation:
    """Turns of a user and a model, and the cache that holds them.

    A turn adds what the chat template puts after the last answer. If the template writes earlier
    turns differently once there are more (some leave out reasoning), or after `renew`, all turns
    are read again into a new cache.

    Attributes:
        loaded: the model, whose tokenizer has a chat template.
        make: returns an empty cache for the model.
        turns: messages as chat templates take them.
        cache: holds the tokens of `ids` but the last; None: all turns will be read.
        ids: token ids of the text so far.
        text: the text so far, as the template and the model wrote it.
    """

    loaded: "LoadedModel"
    make: Callable[[], "Cache"]
    turns: list[dict[str, str]] = field(default_factory=list)
    cache: "Cache | None" = None
    ids: list[int] = field(default_factory=list)
    text: str = ""

    def renew(self, make: Callable[[], "Cache"] | None = None) -> None:
        """Read all turns again with the next one, into a new cache, possibly of another kind."""
        self.make = self.make if make is None else make
        self.cache, self.ids, self.text = None, [], ""

    def clear(self) -> None:
        """Forget all turns."""
        self.turns.clear()
        self.renew()

    def next_ids(self, message: str) -> list[int]:
        """Return the token ids up to the answer to a message; nothing changes."""
        text = self._template([*self.turns, {"role": "user", "content": message}])
        known = self.cache is not None and bool(self.text) and text.startswith(self.text)
        rest = text[len(self.text) :] if known else text
        more = self.loaded.tokenizer.encode(rest, add_special_tokens=False)
        return [*self.ids, *more] if known else list(more)

    def answer(self, message: str, options: Mapping[str, Any]) -> str:
        """Let the model answer a message, and return the answer's text.

        Args:
            message: of the user.
            options: of `generate`.

        Raises:
            ValueError: the cache refuses the tokens. All turns are read again with the next one.
        """
        import torch

        ids = self.next_ids(message)
        if self.cache is None or ids[: len(self.ids)] != self.ids:
            self.renew()
            self.cache = self.make()
        given = torch.tensor([ids], device=self.loaded.model.device)
        try:
            new = self._generate(given, options)
        except BaseException:  # a pass that has not ended leaves a cache that cannot go on
            self.renew()
            raise
        turn = {"role": "user", "content": message}
        written = self._template([*self.turns, turn])
        decode = self.loaded.tokenizer.decode
        answer = str(decode(new, skip_special_tokens=True))
        self.turns += [turn, {"role": "assistant", "content": answer}]
        self.ids = [*ids, *new]
        self.text = written + str(decode(new, skip_special_tokens=False))
        return answer

    def _generate(self, given: "Tensor", options: Mapping[str, Any]) -> list[int]:
        assert self.cache is not None
        generator: Any = self.loaded.model
        found = generator.generate(
            given,
            attention_mask=given.new_ones(given.shape),
            **passing(generator, self.cache),
            **options,
        )
        new: list[int] = found[0, given.shape[1] :].tolist()
        return new

    def _template(self, turns: list[dict[str, str]]) -> str:
        return str(
            self.loaded.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        )
