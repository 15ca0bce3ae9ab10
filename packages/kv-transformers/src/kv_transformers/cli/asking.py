"""The documents of `kv-serve generate --document`: their cache, and the tokens of a question."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kv_transformers.cli.console import refuse, refusing
from kv_transformers.cli.prompts import around_document

if TYPE_CHECKING:
    from torch import Tensor

    from kv_transformers.cache import CompressedCache
    from kv_transformers.models import LoadedModel


def policy_of(documents: Sequence[Path], policy: str | None) -> str:
    """Return the policy of documents; exit with an error if it is not the given one."""
    from kv_transformers.document import expect_policies, read_facts

    with refusing(ValueError, FileNotFoundError):
        facts = [read_facts(document) for document in documents]
        return str(expect_policies(documents, facts, policy))


def open_documents(
    documents: Sequence[Path], loaded: "LoadedModel", backend: str
) -> "CompressedCache":
    """Load documents, one after another; exit with an error if they have several sequences.

    Raises:
        ValueError: as `CompressedCache.load`.
    """
    from kv_transformers.cache import CompressedCache

    cache = CompressedCache.load(
        loaded.model, documents, backend=backend, tokenizer=loaded.tokenizer
    )
    if cache.batch_size != 1:
        refuse(
            f"{documents[0]} has {cache.batch_size} sequences; --document needs one of one sequence"
        )
    return cache


def question(
    loaded: "LoadedModel", cache: "CompressedCache", text: str, *, raw: bool
) -> "tuple[Tensor, Tensor]":
    """Return the token ids of what was loaded with a question after it, and their mask.

    Private ids are those of padding: the model reads the ids of the question alone.
    """
    import torch

    document = cache.document
    assert document is not None  # the cache is loaded
    if raw and document.chat:
        refuse("the document was compressed as the begin of a chat; omit --raw, or compress it so")
    if not raw and document.chat is None:
        refuse("the document was saved without saying whether it begins a chat; use --raw")
    text = f"\n\n{text}"  # as between --prompt-file and PROMPT
    if document.chat:
        text += around_document(loaded)[1]
    fresh = torch.tensor([loaded.tokenizer.encode(text, add_special_tokens=False)])
    held, known = document.held, document.ids
    before = torch.zeros(held.shape, dtype=fresh.dtype) if known is None else known
    mask = torch.cat((held.long(), torch.ones_like(fresh)), 1)
    device = loaded.model.device
    return torch.cat((before, fresh), 1).to(device), mask.to(device)
