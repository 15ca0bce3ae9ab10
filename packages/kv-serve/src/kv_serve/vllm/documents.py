"""Documents that an engine loads when it starts: files of `kv-serve compress`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torch import Tensor

from kv_policy import KVPolicy
from kv_runtime import Account, CacheState
from kv_serve.vllm.config import UnservableError
from kv_serve.vllm.names import DOCUMENTS
from kv_transformers.document import damaged, expect_policy, load_for
from kv_transformers.fitted import fingerprint_at

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUFFIX: Final = ".kv"


@dataclass(frozen=True)
class LoadedDocument:
    """A document's compressed state, which requests that begin with its tokens continue.

    Attributes:
        path: its file.
        number: that of the prefix, counted from 1 in the order of names.
        ids: its token ids.
        state: its state; tensors are views of the mapped file.
        own: what it has of layers that are not under the policy, likewise.
    """

    path: Path
    number: int
    ids: tuple[int, ...]
    state: CacheState
    own: Mapping[str, Tensor] = field(default_factory=dict)

    def most_pages(self, account: Account) -> int:
        """Return a bound of its pages, by the lengths of its table rows."""
        rows = account.table_rows
        size = min(each.tokens for each in rows)
        beside = sum(each.count * each.partial for each in rows) + account.window_pages
        lengths = (x for name, x in self.state.tensors.items() if name.endswith(".length"))
        return beside + sum(int((-(-x.long() // size)).sum()) for x in lengths)

    def damaged(self, error: ValueError) -> ValueError:
        """Return the error of a state that cannot be restored."""
        return damaged(self.path, error)


def documents(config: "VllmConfig", policy: KVPolicy) -> Iterator[LoadedDocument]:
    """Yield the documents in the folder that the configuration names, if it names one.

    Raises:
        UnservableError: there is no such folder or no document in it, or a file is of another
            model or policy, has several sequences or no token ids, or is damaged.
    """
    given = config.additional_config.get(DOCUMENTS)
    if given is None:
        return
    if config.parallel_config.tensor_parallel_size > 1:
        raise UnservableError(
            f"{DOCUMENTS} is given, but documents hold the heads of all devices, and tensor "
            "parallelism divides them; omit one of the two"
        )
    folder = Path(given)
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if not found:
        raise UnservableError(
            f"{DOCUMENTS} is {given}, but there is no file *{SUFFIX} in such a folder; write one "
            "with `kv-serve compress MODEL TEXT --out FILE.kv`"
        )
    own = fingerprint_at(config.model_config.model)
    for number, path in enumerate(found, 1):
        try:
            facts, document, state = load_for(path, own)
            expect_policy(path, facts, policy)
        except ValueError as error:
            raise UnservableError(str(error)) from error
        ids = document.ids
        if ids is None or len(ids) != 1 or not bool(document.held.all()):
            raise UnservableError(
                f"{path} cannot be shared by requests: it has several sequences, or no token ids "
                "to compare with theirs; compress one text, without --private"
            )
        yield LoadedDocument(path, number, tuple(ids[0].tolist()), state, document.own)
