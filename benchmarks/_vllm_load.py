"""Requests of real text, of lengths drawn with a seed."""

import random
from dataclasses import dataclass

from _vllm_engine import Ask
from transformers import AutoTokenizer

from kv_eval.tasks import default_text
from kv_transformers.models import model_folder


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all come at once; lengths are spread evenly between two, both included."""

    name: str
    requests: int
    prompt: tuple[int, int]  # tokens
    answer: tuple[int, int]

    @property
    def mean(self) -> float:
        """Tokens of a request when it ends, on average."""
        return (sum(self.prompt) + sum(self.answer)) / 2

    @property
    def longest(self) -> int:
        """Tokens of the longest request that it may have."""
        return self.prompt[1] + self.answer[1]

    def asks(self, seed: int = 0) -> list[Ask]:
        """Windows of the default text; two may overlap, which is nothing without prefix caching."""
        random_ = random.Random(f"{self} {seed}")
        ids = text_ids()
        found = []
        for _ in range(self.requests):
            prompt, answer = (random_.randint(*span) for span in (self.prompt, self.answer))
            begin = random_.randrange(len(ids) - prompt)
            found.append(Ask(tuple(ids[begin : begin + prompt]), answer))
        return found


def text_ids() -> list[int]:
    """The default text as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder(), trust_remote_code=False)
    ids: list[int] = tokenizer.encode(default_text().body, add_special_tokens=False, verbose=False)
    return ids


def raw_token_bytes() -> int:
    """Bytes that keys and values of one token take in all layers, in the model's dtype of 2 bytes.

    These are what a cache of a stock vLLM takes for it.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_folder(), trust_remote_code=False)
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
