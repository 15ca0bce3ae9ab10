"""The lm-eval (EleutherAI's harness) model interface for compressed caches.

A context is read into a policy's cache up to its last token and compressed; that token and later
ones are computed from the compressed cache.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from lm_eval.api.model import TemplateLM
from torch import Tensor

from kv_eval.evaluate.decode import ends_of, read
from kv_eval.tasks import TaskError
from kv_transformers.from_text import MakeCache, held

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import Cache

    from kv_transformers.models import LoadedModel

NEW_TOKENS = 256  # per answer, unless a task sets it


@dataclass(frozen=True, slots=True)
class Asked:
    """Cost of one request: context tokens, cache bytes after the context, and seconds."""

    length: int
    kv_bytes: int
    full_bytes: int
    seconds: float


class CompressedLM(TemplateLM):
    """A loaded model whose contexts use the cache of one policy, one request at a time."""

    def __init__(
        self,
        loaded: "LoadedModel",
        spec: str,
        make: MakeCache,
        done: Callable[[Asked], None] = lambda asked: None,
    ) -> None:
        """Wrap a model.

        Args:
            loaded: the model and its tokenizer.
            spec: the policy's text, or `full`.
            make: creates an empty cache.
            done: called with every request once it is answered.
        """
        super().__init__()
        self.tokenizer = loaded.tokenizer
        self._loaded, self._spec, self._make, self._done = loaded, spec, make, done

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token, used as the context of a text without one."""
        ends = sorted(ends_of(self._loaded.model))
        found = self._loaded.tokenizer.bos_token_id
        return int(ends[0] if found is None else found)

    @property
    def tokenizer_name(self) -> str:
        """The key under which lm-eval caches requests."""
        return self._loaded.name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the model's template."""
        return str(
            self._loaded.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Encode a text, by default with the model's own special tokens."""
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self._loaded.tokenizer.encode(string, **given)
        return ids

    def generate_until(
        self, requests: "Sequence[Instance]", disable_tqdm: bool = False
    ) -> list[str]:
        """Answer greedily, up to the first stop string of a request.

        Raises:
            TaskError: a request asks for sampling, or exceeds the model's context length.
        """
        return [self._generated(*request.args) for request in requests]

    def loglikelihood_rolling(
        self, requests: "Sequence[Instance]", disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of texts, each token given the cache of those before it.

        Raises:
            TaskError: a text exceeds the model's context length.
        """
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        return [self._continued([self.eot_token_id], ids)[0] for ids in texts]

    def _loglikelihood_tokens(
        self, requests: Iterable[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        return [self._continued(context, rest) for _, context, rest in requests]

    def _generated(self, context: str, wanted: dict[str, Any]) -> str:
        if wanted.get("do_sample", wanted.get("temperature", 0) > 0):  # greedy at any temperature
            raise TaskError(
                "a task requests sampled answers; policies are compared with greedy ones only"
            )
        until = wanted.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        most = int(wanted.get("max_gen_toks", NEW_TOKENS))
        began, ids = time.perf_counter(), self.tok_encode(context)
        cache, logits, size = self._read(ids, most)
        ends, text = ends_of(self._loaded.model), ""
        said: list[int] = []
        while len(said) < most:
            token = int(logits.argmax())
            if token in ends:
                break
            said.append(token)
            text = str(self._loaded.tokenizer.decode(said, skip_special_tokens=True))
            if any(stop in text for stop in stops):
                break
            if len(said) < most:
                logits = self._fed(cache, [token])
        self._done(Asked(len(ids), *size, time.perf_counter() - began))
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]

    def _continued(self, context: list[int], rest: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of tokens, and whether each is the most likely."""
        began, total, greedy = time.perf_counter(), 0.0, True
        cache, logits, size = self._read(context, len(rest))
        for i, token in enumerate(rest):
            if i:
                logits = self._fed(cache, [rest[i - 1]])
            total += float(logits.double().log_softmax(-1)[token])
            greedy &= int(logits.argmax()) == token
        self._done(Asked(len(context), *size, time.perf_counter() - began))
        return total, greedy

    def _read(
        self, ids: list[int], more: int
    ) -> tuple["Cache", Float[Tensor, " V"], tuple[int, int]]:
        """Compress a context without its last token, then feed that; also return the bytes."""
        limit = getattr(self._loaded.model.config, "max_position_embeddings", None)
        if limit is not None and len(ids) + more > limit:
            raise TaskError(
                f"a request of {len(ids):,} tokens with {more:,} new ones exceeds the context "
                f"length {limit:,} of {self._loaded.name}; use a shorter task or another model"
            )
        cache = self._make(self._loaded.model, self._spec)
        if len(ids) > 1:
            self._fed(cache, ids[:-1])
        size = held(cache)
        return cache, self._fed(cache, ids[-1:]), (size.kv_bytes, size.full_bytes)

    def _fed(self, cache: "Cache", ids: list[int]) -> Float[Tensor, " V"]:
        return read(self._loaded.model, cache, torch.tensor([ids]))[0]
