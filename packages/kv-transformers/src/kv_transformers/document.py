"""Files of compressed caches: a document that is compressed once and asked many times.

A file has one tensor for each part of a cache's state (`kv_runtime.CacheState`), the token ids or
their hash, the policy's text and the fingerprint of the model. It has no pages, so it is loaded
with any page size, on any device. Checksums cover every byte; still, everything is validated.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kv_policy import KVPolicy, parse
from kv_policy.decoding import decode
from kv_policy.tensor_files import Advice, read_advised, write
from kv_runtime import CacheFacts, CacheState
from kv_transformers.fitted import fingerprint_of
from kv_transformers.own_states import PREFIX

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT: Final = "kv-transformers document 1"
_IDS: Final = "ids"
_AGAIN: Final = "compress the document again"
_ADVICE: Final = Advice(
    "write one with `kv-serve compress MODEL TEXT --out FILE` or CompressedCache.save",
    "name a file that `kv-serve compress` or CompressedCache.save wrote",
    _AGAIN,
)


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a document's file: the model, the state, and whether its text begins a chat."""

    model: str  # display name
    fingerprint: str  # of its weights, settings and tokenizer
    digest: str | None  # of the token ids, if they are private
    chat: bool | None  # whether the tokens are the begin of a chat; None: unknown
    cache: CacheFacts


@dataclass(frozen=True)
class Document:
    """The tokens of a cache that was loaded from a file.

    Attributes:
        held: which columns hold a token.
        ids: the token ids; None: they are private, or were not given when it was saved.
        digest: of private ids.
        chat: whether the tokens are the begin of a chat, of which the question is still to come;
            None: unknown.
    """

    held: Bool[Tensor, "B T"]
    ids: Int[Tensor, "B T"] | None
    digest: str | None
    chat: bool | None
    own: Mapping[str, Tensor] = field(default_factory=dict)  # of layers that transformers caches

    def expect(self, ids: Int[Tensor, "B L"]) -> None:
        """Raise unless token ids begin with those of the document.

        Args:
            ids: of the document, or of the document and what follows.

        Raises:
            ValueError: they do not, or the document has neither ids nor their hash.
        """
        rows, columns = self.held.shape
        if ids.ndim != 2 or len(ids) != rows or ids.shape[1] < columns:
            raise ValueError(
                f"the document has {rows} sequences of {columns} tokens, but ids of shape "
                f"{tuple(ids.shape)} were given; give its ids, and those after them"
            )
        mine = ids[:, :columns].cpu().long()
        if self.ids is not None:
            differs = (mine != self.ids.cpu()) & self.held
            if bool(differs.any()):
                row, column = differs.nonzero()[0].tolist()
                raise ValueError(
                    f"the ids given are not those of the document: sequence {row} differs at token "
                    f"{column}; give the ids it was compressed with, or compress this text"
                )
        elif self.digest is None:
            raise ValueError(
                "the document was saved without ids, so they cannot be compared; omit ids, or save "
                "it with them"
            )
        elif self.digest != digest_of(mine, self.held):
            raise ValueError(
                "the ids given are not those of the document, whose hash differs; give the ids it "
                "was compressed with, or compress this text"
            )


def one_after_another(documents: Sequence[Document]) -> Document:
    """Return the document that a cache holds after several were loaded into it, in order.

    Private ids make those of the whole private; they cannot be compared any more.

    Raises:
        ValueError: some begin a chat and others do not, they differ in sequences, or a layer of the
            model keeps keys or states of its own, which are of one prompt.
    """
    first, *more = documents
    if not more:
        return first
    if any(each.own for each in documents):
        raise ValueError(
            "documents cannot follow each other in this model: layers that transformers caches, "
            "such as sliding windows and linear attention, hold the end of one prompt; compress "
            "the documents as one text"
        )
    if any(each.chat != first.chat for each in more):
        raise ValueError(
            "some of the documents were compressed as the begin of a chat and others were not; "
            "compress all with the same choice of --raw"
        )
    rows = [len(each.held) for each in documents]
    if len(set(rows)) > 1:
        raise ValueError(
            f"documents of {rows} sequences cannot follow each other; compress batches of equal "
            "size"
        )
    ids = [each.ids for each in documents if each.ids is not None]
    return Document(
        torch.cat([each.held for each in documents], 1),
        torch.cat(ids, 1) if len(ids) == len(documents) else None,
        None,
        first.chat,
    )


def digest_of(ids: Int[Tensor, "B T"], held: Bool[Tensor, "B T"]) -> str:
    """Return the SHA-256 of token ids; those of padding have no effect."""
    plain = torch.where(held, ids.cpu().long(), -1)
    text = repr((tuple(plain.shape), plain.flatten().tolist()))
    return hashlib.sha256(text.encode()).hexdigest()


def save(
    path: Path,
    model: "PreTrainedModel",
    state: CacheState,
    ids: Int[Tensor, "B T"] | None,
    own: Mapping[str, Tensor],
    *,
    private: bool,
    chat: bool | None,
) -> None:
    """Write the state of a cache, `own` of other layers, and what they are of, atomically.

    Raises:
        ValueError: the model was not loaded from files, or the ids are not those of the columns.
        OSError: writing failed; an existing file is unchanged.
    """
    fingerprint = fingerprint_of(model)
    if fingerprint is None:
        raise ValueError(
            "the cache cannot be saved, as its model was not loaded from a folder that can be "
            "compared when it is loaded; load it with kv_transformers.load_model or from_pretrained"
        )
    held, tensors, digest = state.tensors["columns"], {**state.tensors, **own}, None
    if ids is None and private:
        raise ValueError("private=True saves the hash of the token ids; pass ids")
    if ids is not None:
        if ids.shape != held.shape:
            raise ValueError(
                f"ids of shape {tuple(ids.shape)} were given, but the cache holds "
                f"{held.shape[0]} sequences of {held.shape[1]} columns; pass the ids of exactly "
                "these (generate does not store the last token that it returns)"
            )
        if private:
            digest = digest_of(ids, held)
        else:
            tensors[_IDS] = torch.where(held, ids.cpu(), 0).int()
    name = Path(model.config.name_or_path or "").name
    facts = Facts(model=name, fingerprint=fingerprint, digest=digest, chat=chat, cache=state.facts)
    write(path, FORMAT, msgspec.json.encode(facts).decode(), tensors)


def read_facts(path: Path) -> Facts:
    """Read the header of a file alone.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is damaged, of a newer format, or no document.
    """
    return _decoded(path, read_advised(path, FORMAT, _ADVICE, tensors=False)[0])


def load(path: Path, model: "PreTrainedModel") -> tuple[Facts, Document, CacheState]:
    """Read a file for a model; tensors are views of the mapped file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is damaged, of a newer format, no document, or of another model.
    """
    return load_for(path, fingerprint_of(model))


def load_for(path: Path, found: str | None) -> tuple[Facts, Document, CacheState]:
    """Read a file for a model with this fingerprint, as `load`; None: it has none.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is damaged, of a newer format, no document, or of another model.
    """
    text, tensors = read_advised(path, FORMAT, _ADVICE)
    facts = _decoded(path, text)
    if found != facts.fingerprint:
        here = (
            "was not loaded from a folder that can be compared" if found is None else f"is {found}"
        )
        raise ValueError(
            f"{path} was compressed with the model {facts.model} ({facts.fingerprint}), but this "
            f"one {here}; load that model, or compress the document with this one"
        )
    return facts, _document(path, facts, tensors), CacheState(facts.cache, tensors)


def _decoded(path: Path, text: str) -> Facts:
    try:
        return decode(text, Facts)
    except ValueError as error:
        raise damaged(path, ValueError(f"its header is invalid: {error}")) from None


def damaged(path: Path | str, error: ValueError) -> ValueError:
    """Return the error of a file, or of several named, whose state contradicts itself."""
    return ValueError(f"{path} is damaged: {error}; {_AGAIN}")


def expect_policy(path: Path, facts: Facts, policy: KVPolicy | str | None) -> KVPolicy:
    """Return the policy of a file, or the given one, if it is that.

    Raises:
        ValueError: another one is given, or that of the file is not installed.
    """
    text = facts.cache.policy
    if policy is None:
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"{path} is under the policy {text[:200]!r}: {error}") from None
    given = parse(policy) if isinstance(policy, str) else policy
    if str(given) != text:
        raise ValueError(
            f"{path} is under the policy {text[:200]}, but {given} was given; omit the policy, or "
            "compress the document under that one"
        )
    return given


def expect_policies(
    paths: Sequence[Path], facts: Sequence[Facts], policy: KVPolicy | str | None
) -> KVPolicy:
    """Return the policy of files that follow each other, or the given one, if it is that.

    Raises:
        ValueError: as `expect_policy`, or the files are under different policies.
    """
    found = expect_policy(paths[0], facts[0], policy)
    for path, each in zip(paths[1:], facts[1:], strict=True):
        if each.cache.policy != facts[0].cache.policy:
            raise ValueError(
                f"{path} is under the policy {each.cache.policy[:200]}, but {paths[0]} is under "
                f"{found}; compress documents that follow each other under one policy"
            )
    return found


def _document(path: Path, facts: Facts, tensors: dict[str, Tensor]) -> Document:
    """Take the token ids out of the tensors, and compare them with the columns."""
    ids, held = tensors.pop(_IDS, None), tensors.get("columns")
    shape = (facts.cache.sequences, facts.cache.columns)
    if held is None or held.dtype != torch.bool or tuple(held.shape) != shape:
        raise damaged(path, ValueError(f"columns should be torch.bool of {shape}"))
    if ids is not None:
        if ids.dtype != torch.int32 or tuple(ids.shape) != shape or bool((ids < 0).any()):
            raise damaged(path, ValueError(f"ids should be torch.int32 of {shape}, 0 or more"))
        ids = ids.long()
    own = {name: tensors.pop(name) for name in [*tensors] if name.startswith(PREFIX)}
    return Document(held.clone(), ids, facts.digest, facts.chat, own)
