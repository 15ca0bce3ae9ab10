"""The demo: one model, one hidden number, a short chat, and several caches side by side."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from kv_eval.evaluate.decode import answer, ends_of, read
from kv_eval.tasks import Text, found, needle
from kv_policy import parse
from kv_policy.files import write_whole
from kv_transformers.from_text import FULL, MakeCache, caches_of, folded, held

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kv_transformers.models import LoadedModel

LENGTH: Final = 2200  # tokens of the needle prompt
QUICK_LENGTH: Final = 600
CHOSEN: Final = "kv-compress:keep=25%+k8v4"  # the policy of the README
GATED: Final = "gate:file=smollm2-135m,keep=12.5%+k8v4"
TIMED: Final = 16  # tokens of the timing run
TURNS: Final = ("What is the capital of France?", "Which language is spoken in that city?")
NAMED: Final = "French"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one cache in the demo."""

    policy: str
    needle: str  # the model's answer
    needle_right: bool
    chat: str  # the model's last reply
    chat_right: bool
    kv_bytes: int  # cache bytes after the needle prompt
    full_bytes: int
    ratio: float
    token_ms: float  # per token generated after the needle prompt


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file of a demo."""

    model: str
    prompt_tokens: int
    needle: str  # the hidden number
    depth: float  # its position in the prompt, from 0 to 1
    attention: str  # backend of the compressed caches
    outcomes: tuple[Outcome, ...]

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def caches(length: int, fingerprint: str) -> tuple[str, ...]:
    """Return the full cache, two formats, the newest half of the tokens, and a per-head quarter.

    For the model with the fingerprint of the gate's, also an eighth of the tokens, chosen without
    the question.
    """
    every = (FULL, "k8v4", "k4v2", f"streaming:budget={length // 2}", CHOSEN)
    return (*every, GATED) if parse(GATED).fitted_to == fingerprint else every


class Show:
    """The prompts of a demo, run with each cache."""

    def __init__(self, loaded: "LoadedModel", text: Text, length: int, seed: int = 0) -> None:
        """Hide a number at about a third of a text of `length` tokens.

        Raises:
            TaskError: the text is too short, or the length is too small for the wording.
        """
        self.loaded = loaded
        spread = needle(
            loaded.tokenizer, text, length=length, samples=3, setting="aware", seed=seed
        )
        self.sample = spread[0]

    def run(
        self,
        specs: tuple[str, ...],
        make: MakeCache | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Iterator[Outcome]:
        """Run the prompts with one cache after another, with its basis folded into the model.

        Args:
            specs: text forms of policies, or `full`.
            make: creates a cache.
            say: called with the reason if a basis cannot be folded; the cache then runs unfolded.
        """
        make = make or caches_of(self.loaded)
        for spec in specs:
            with folded(self.loaded.model, spec) as reason:
                outcome = self._outcome(spec, make)
            if reason is not None and say is not None:
                say(f"{spec}: the basis is not folded into the model: {reason}")
            yield outcome

    def report(self, outcomes: tuple[Outcome, ...], attention: str) -> Demo:
        """Combine the outcomes with the prompt and the attention backend."""
        return Demo(
            model=self.loaded.name,
            prompt_tokens=self.sample.length,
            needle=self.sample.answers[0],
            depth=self.sample.depth,
            attention=attention,
            outcomes=outcomes,
        )

    def _outcome(self, spec: str, make: MakeCache) -> Outcome:
        model, sample = self.loaded.model, self.sample
        cache = make(model, spec)
        read(model, cache, torch.tensor([sample.prompt_ids]))
        size = held(cache)
        logits = read(model, cache, torch.tensor([sample.question_ids]))
        said = answer(model, cache, logits, sample.new_tokens, ends_of(model))[0]
        began = time.perf_counter()
        answer(model, cache, logits, TIMED + 1)  # timed separately, whatever the tokens
        token_ms = 1000 * (time.perf_counter() - began) / TIMED
        spoken = self._decode(said)
        reply = chat(self.loaded, make, spec)
        return Outcome(
            policy=spec,
            needle=spoken,
            needle_right=found(spoken, sample.answers[0]),
            chat=reply,
            chat_right=NAMED in reply,
            kv_bytes=size.kv_bytes,
            full_bytes=size.full_bytes,
            ratio=size.ratio,
            token_ms=token_ms,
        )

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return str(self.loaded.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


def chat(loaded: "LoadedModel", make: MakeCache, spec: str, new_tokens: int = 32) -> str:
    """Ask the model a question and a follow-up about its answer, and return the last reply.

    Both turns use one cache, which continues after the first reply.

    Raises:
        ValueError: the model's chat template is missing or rewrites earlier turns.
    """
    model, tokenizer, cache = loaded.model, loaded.tokenizer, make(loaded.model, spec)
    ends = ends_of(model)
    first, second = TURNS
    start = _render(tokenizer, [first])
    logits = read(model, cache, _encode(tokenizer, start))
    said = answer(model, cache, logits, new_tokens, ends)[0]
    spoken = str(tokenizer.decode(list(said)))
    whole = _render(tokenizer, [first, spoken, second])
    if not whole.startswith(start + spoken):
        raise ValueError(f"the chat template of {loaded.name} rewrites earlier turns of a chat")
    # The last token of a reply is not in the cache yet.
    last = torch.tensor([said[-1:]], dtype=torch.long)
    rest = _encode(tokenizer, whole.removeprefix(start + spoken))
    logits = read(model, cache, torch.cat([last, rest], -1))
    reply = answer(model, cache, logits, new_tokens, ends)[0]
    return str(tokenizer.decode(list(reply), skip_special_tokens=True)).strip()


def _render(tokenizer: "PreTrainedTokenizerBase", turns: list[str]) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> torch.Tensor:
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
