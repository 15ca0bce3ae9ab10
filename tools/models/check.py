"""The check of one architecture: a compressed cache against the model's own."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor

from tools.models.build import build
from tools.models.pictures import with_picture
from tools.models.sizes import SPECIAL, VOCABULARY

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from kv_transformers import CompressedCache

BATCH: Final = 2
PROMPT: Final = 40
PADDING: Final = 7  # columns before the second prompt
NEW: Final = 24
FEW: Final = 8  # new tokens, where a part needs no more
CHUNKS: Final = (17, 29, PROMPT)
STEPS: Final = (PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 10, PROMPT + NEW)
KEPT: Final = 24
PAGE: Final = 4  # tokens
TOLERANCE: Final = 5e-4  # of the spread of the logits, in float32
SAME: Final = 1e-5
CLOSE: Final = 0.1  # the same for 8 bits, of the median token: few choose other experts
SELECTORS: Final = (f"snapkv:budget={KEPT},window=8+k8v4", f"kv-compress:budget={KEPT}")
OURS: Final = "kv_"  # packages of this repository

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """What a model gave: tokens (B, L) and the logits of the new ones (B, N, V)."""

    tokens: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Failure:
    """What went wrong in one part of the check; `late`: we refused, but after construction."""

    part: str
    said: str
    late: bool = False


def prompts() -> tuple[Tensor, Tensor]:
    """Return the ids and the mask of two prompts, the second with padding on its left."""
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(SPECIAL, VOCABULARY, (BATCH, PROMPT), generator=random)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids * mask, mask


def said(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _of_ours(error: BaseException) -> bool:
    """Return whether a statement of our code raised an error, and no call that failed in it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = any(part.startswith(OURS) for part in Path(last.filename).parts)
    return ours and (last.line or "").startswith("raise ") and bool(str(error))


def own_cache(model: "PreTrainedModel") -> "Cache":
    """Return the cache that transformers would use."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


@torch.no_grad()
def generate(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    cache: "Cache | None" = None,
    new: int = NEW,
    **more: int | Tensor,
) -> Run:
    """Continue prompts greedily, with a cache or the model's own."""
    from kv_transformers import passing

    given = {} if cache is None else passing(model, cache)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **given,
        **more,
    )
    return Run(out.sequences, torch.stack(out.logits, 1).float())


@torch.no_grad()
def read(
    model: "PreTrainedModel", cache: "Cache", ids: Tensor, mask: Tensor, cuts: Sequence[int]
) -> Tensor:
    """Return the logits of all columns (B, L, V), read in chunks that end at `cuts`."""
    from kv_transformers import passing

    position = (mask.cumsum(-1) - 1).clamp(min=0)
    positioned = "position_ids" in signature(model.forward).parameters
    logits, begin = [], 0
    for end in cuts:
        more = {"position_ids": position[:, begin:end]} if positioned else {}
        out = model(
            input_ids=ids[:, begin:end],
            attention_mask=mask[:, :end],
            use_cache=True,
            **more,
            **passing(model, cache),
        )
        logits.append(out.logits.float())
        begin = end
    return torch.cat(logits, 1)


def furthest(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the spread of what is expected."""
    return float((found - expected).abs().max() / expected.std())


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference of the median token over the spread."""
    return float((found - expected).square().mean(-1).sqrt().median() / expected.std())


class Check:
    """The parts of the check of one model, each of which yields what is wrong."""

    def __init__(self, model: "PreTrainedModel") -> None:
        """Run the model with its own cache, to which all is compared."""
        self.model = model
        self.ids, self.mask = prompts()
        self.real = self.mask.bool()
        self.own = generate(model, self.ids, self.mask)
        self.after = torch.cat([self.mask, torch.ones(BATCH, NEW, dtype=torch.long)], 1)
        self.measured: dict[str, float] = {}
        self.compressed = 0  # layers
        self.skipped: dict[str, str] = {}  # parts that the model's own cache cannot do
        self.without: dict[str, str] = {}  # policies, or a picture, refused where others work

    def cache(self, policy: str = "raw") -> "CompressedCache":
        """Return a compressed cache."""
        from kv_transformers import CompressedCache

        return CompressedCache(self.model, policy, page_tokens=PAGE)

    def failures(self) -> Iterator[Failure]:
        """Run all parts; an exception fails its part."""
        exact = (self.tokens, self.chunks, self.turn, self.again, self.beams, self.picture)
        for part in (*exact, self.close, *self._selectors(), self.unchanged):
            name = part.__name__
            try:
                yield from (Failure(name, wrong) for wrong in part())
            except Exception as error:
                yield Failure(name, said(error), late=_of_ours(error))

    def unchanged(self) -> Iterator[str]:
        """Without a compressed cache, the model gives what it gave before there was one."""
        off = furthest(generate(self.model, self.ids, self.mask).logits, self.own.logits)
        if not off < SAME:
            yield f"the model's own logits are off by {off:.1e} afterwards"

    def tokens(self) -> Iterator[str]:
        """Generated tokens and their logits are those of the model's own cache."""
        cache = self.cache()
        found = generate(self.model, self.ids, self.mask, cache)
        self.compressed = cache.memory().tokens.shape[0]
        yield from self._compare("generated", found, self.own)

    def chunks(self) -> Iterator[str]:
        """A prompt read in chunks gives the logits that the model's own cache gives."""
        expected = self._own("chunks", lambda: self._read(own_cache(self.model), CHUNKS))
        if expected is not None:
            off = furthest(self._read(self.cache(), CHUNKS), expected)
            self.measured["chunks"] = off
            if not off < TOLERANCE:
                whole = self._read(own_cache(self.model), (PROMPT,))
                yield f"logits are off by {off:.1e} (own chunks: {furthest(expected, whole):.1e})"
        run = self._own("chunks of generate", lambda: self._chunked(own_cache(self.model)))
        if run is not None:
            yield from self._compare("generated from chunks", self._chunked(self.cache()), run)

    def turn(self) -> Iterator[str]:
        """A second turn on the same cache gives what it gives on the model's own."""
        expected = self._own("turn", lambda: self._turns(own_cache(self.model)))
        if expected is not None:
            yield from self._compare("second turn", self._turns(self.cache()), expected)

    def again(self) -> Iterator[str]:
        """A cache that was reset gives what a new one gives."""
        cache = self.cache()
        generate(self.model, self.ids.flip(1), torch.ones_like(self.mask), cache, new=FEW)
        cache.reset()
        found = generate(self.model, self.ids, self.mask, cache, new=FEW)
        expected = Run(self.own.tokens[:, : PROMPT + FEW], self.own.logits[:, :FEW])
        yield from self._compare("after a reset", found, expected)

    def beams(self) -> Iterator[str]:
        """Beam search, which reorders a cache's sequences, gives the same tokens."""
        expected = self._own("beams", lambda: self._beams(own_cache(self.model)))
        if expected is not None:
            yield from self._compare("beams", self._beams(self.cache()), expected)

    def close(self) -> Iterator[str]:
        """With 8 bits, the logits of the same tokens are close."""
        ids, mask = self.own.tokens, self.after
        expected = self._own(
            "close", lambda: read(self.model, own_cache(self.model), ids, mask, STEPS)
        )
        if expected is None:
            return
        found = read(self.model, self.cache("k8v8"), ids, mask, STEPS)
        off = distance(found[:, PROMPT:], expected[:, PROMPT:])
        self.measured["k8v8"] = off
        if not off < CLOSE:
            yield f"logits with k8v8 are off by {off:.2f}"

    def picture(self) -> Iterator[str]:
        """A picture in the prompt gives the same tokens, or is refused with a sentence."""
        for ids, given in with_picture(self.model, self.ids):
            run = partial(generate, self.model, ids, self.mask, **given)
            expected = self._own("picture", run)
            if expected is None:
                continue
            if not furthest(expected.logits, self.own.logits) > TOLERANCE:
                continue  # the model does not look at it
            try:
                found = generate(self.model, ids, self.mask, self.cache(), **given)
            except Exception as error:
                if not _of_ours(error):
                    raise
                self.without["a picture"] = said(error)
                return
            yield from self._compare("picture", found, expected)
            return

    def _selectors(self) -> Iterator[Callable[[], Iterator[str]]]:
        for policy in SELECTORS:
            part: Any = lambda policy=policy: self.selects(policy)  # noqa: E731
            part.__name__ = policy.partition(":")[0]
            yield part

    def selects(self, policy: str) -> Iterator[str]:
        """A selector keeps as many tokens as it promises, and what follows are numbers."""
        from kv_transformers import UnsupportedModelError

        try:
            cache = self.cache(policy)
        except UnsupportedModelError as error:
            self.without[policy] = said(error)
            return
        generate(self.model, self.ids, self.mask, cache, new=1)  # which is not stored
        kept = cache.memory().tokens
        layers, _, heads = kept.shape
        wanted, found = KEPT * layers * heads, kept.sum((0, 2))
        if ((found > wanted) | (found <= wanted - PAGE)).any():  # whole pages may be evicted
            yield f"keeps {found.tolist()} tokens instead of {wanted}"
        cache = self.cache(policy)
        if not generate(self.model, self.ids, self.mask, cache).logits.isfinite().all():
            yield "gives logits that are not finite"

    def _read(self, cache: "Cache", cuts: Sequence[int]) -> Tensor:
        """Return the logits of the prompts without padding."""
        return read(self.model, cache, self.ids, self.mask, cuts)[self.real]

    def _chunked(self, cache: "Cache") -> Run:
        return generate(self.model, self.ids, self.mask, cache, prefill_chunk_size=16)

    def _beams(self, cache: "Cache") -> Run:
        return generate(self.model, self.ids, self.mask, cache, new=FEW, num_beams=3)

    def _turns(self, cache: "Cache") -> Run:
        """Return what follows a second message."""
        first = generate(self.model, self.ids, self.mask, cache).tokens
        random = torch.Generator().manual_seed(9)
        more = torch.randint(SPECIAL, VOCABULARY, (BATCH, 9), generator=random)
        ids = torch.cat([first, more], 1)
        longer = torch.ones(BATCH, ids.shape[1] - PROMPT, dtype=torch.long)
        return generate(self.model, ids, torch.cat([self.mask, longer], 1), cache, new=FEW)

    def _own(self, part: str, run: Callable[[], T]) -> T | None:
        """Return what the model gives with its own cache, or note why it cannot.

        Its code may raise anything then, and so the part compares nothing.
        """
        try:
            return run()
        except Exception as error:
            self.skipped[part] = said(error)
            return None

    def _compare(self, what: str, found: Run, expected: Run) -> Iterator[str]:
        off = furthest(found.logits, expected.logits)
        same = bool((found.tokens == expected.tokens).all())
        self.measured[what] = off
        if not same or not off < TOLERANCE:
            tokens = "the same tokens" if same else "other tokens"
            yield f"{what}: {tokens}, and logits are off by {off:.1e}"


def layer_types(model: "PreTrainedModel") -> list[str]:
    """Return transformers' type of each layer."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    try:
        return list(get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))[0])
    except Exception:  # no stack of layers
        return []


def check(name: str, variant: str = "") -> dict[str, Any]:
    """Build an architecture's small model and check it; return a row of the result."""
    from kv_transformers import CompressedCache

    row: dict[str, Any] = {"architecture": name, "variant": variant}
    try:
        model = build(name, variant)
    except Exception as error:
        return row | {"result": "unbuildable", "said": said(error)}
    types = layer_types(model)
    row |= {
        "model": type(model).__name__,
        "layers": dict(Counter(types)),
        "hybrid": bool({*types} - {"full_attention"}),
    }
    try:
        CompressedCache(model, "raw")
    except ValueError as error:
        return row | {"result": "refused", "said": " ".join(str(error).split())}
    except Exception as error:
        return row | {"result": "wrong", "said": f"construction: {said(error)}"}
    try:
        checked = Check(model)
    except Exception as error:
        return row | {"result": "unbuildable", "said": f"does not run: {said(error)}"}
    failures = list(checked.failures())
    row |= {
        "distinct": len(set(checked.own.tokens[0, PROMPT:].tolist())),
        "compressed": checked.compressed,
        "picture": "picture" in checked.measured,
        "measured": checked.measured,
        "without": checked.without,
        "skipped": checked.skipped,
    }
    if not failures:
        return row | {"result": "equal", "said": ""}
    late = all(each.late for each in failures)
    return row | {"result": "refused late" if late else "wrong", "said": together(failures)}


def together(failures: Iterable[Failure]) -> str:
    """Return each sentence once, behind the parts that gave it; all of one need no names."""
    parts: dict[str, list[str]] = {}
    for each in failures:
        parts.setdefault(each.said, []).append(each.part)
    if len(parts) == 1:
        return next(iter(parts))
    return "; ".join(f"{', '.join(names)}: {sentence}" for sentence, names in parts.items())
