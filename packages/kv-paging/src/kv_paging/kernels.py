"""Page kernels: the operations on the bytes of pages, and how an implementation is selected.

The kernels in torch serve every device and format, and are the oracle of the others. Those in
Triton, for GPUs, need the extra `triton`. Installed packages register more (`kv_policy.Backend`).
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Final, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from kv_paging.pool import PagePool
from kv_paging.tokens import Stored, VectorNames
from kv_paging.work import DecodeStep, TokenWrite
from kv_policy import PagedTokens, PageLayout, Running, installed_backends


@runtime_checkable
class PageKernels(Protocol):
    """Operations on the rows of a tier, each all at once; their callers have checked arguments.

    `pages` are all rows of a tier as PagedTokens of B = S sequences with a head each, over the
    memory of the whole pool, its scratch page last. `table_rows` names some of them, each once.
    """

    def write(self, pages: PagedTokens, tokens: TokenWrite) -> None:
        """Encode the marked tokens and write them, in order, to slots start[i] and on.

        The table has pages for all of them; where a format takes several tokens together, they fill
        blocks. A codec that refuses leaves the table rows as they are up to `start`, and altogether
        where it is about a token of each.
        """
        ...

    def place(
        self,
        data: UInt8[Tensor, "P nbytes"],
        layout: PageLayout,
        page: Int[Tensor, " n"],
        row: Int[Tensor, " n"],
        key: Float[Tensor, "n D"],
        value: Float[Tensor, "n Dv"],
    ) -> None:
        """Encode tokens and write each to its row of its page, in memory that is nobody's pool.

        Every token stands alone, and pages hold neither scores nor positions. A codec that refuses
        leaves the pages alone.
        """
        ...

    def compact(
        self, pages: PagedTokens, table_rows: Int[Tensor, " S"], stay: Bool[Tensor, "S R"]
    ) -> None:
        """Move the marked blocks past the new end into the gaps before it, the first to the first.

        Bytes, scores and positions go as they are (MoveCache, Algorithm 1 of KV-Compress).
        """
        ...

    def copy_pages(
        self, data: UInt8[Tensor, "P nbytes"], source: Int[Tensor, " n"], target: Int[Tensor, " n"]
    ) -> None:
        """Copy whole pages; no target is a source."""
        ...

    def read(
        self, pages: PagedTokens, table_rows: Int[Tensor, " S"], slots: int, vectors: VectorNames
    ) -> Stored:
        """Give what table rows hold in their first slots."""
        ...

    def rescore(
        self, pages: PagedTokens, table_rows: Int[Tensor, " S"], score: Float[Tensor, "S L"]
    ) -> None:
        """Write new scores slot by slot, and 0 from the L-th to the end of a row's last page."""
        ...

    def accumulate(
        self,
        pages: PagedTokens,
        table_rows: Int[Tensor, " S"],
        before: Int[Tensor, " S"],
        mass: Float[Tensor, "S L"],
        seen: Int[Tensor, "S L"],
        running: Running,
    ) -> None:
        """Let the scores of the first L slots go on, as `update` of `running` says.

        A table row before whose pass there were -1 tokens is left alone.
        """
        ...

    def weakest(
        self,
        pages: PagedTokens,
        table_rows: Int[Tensor, " S"],
        slots: int,
        until: Int[Tensor, " S"] | None,
    ) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
        """Give the lowest score in the first slots and the first slot that has it, else inf and -1.

        With `until`, only of tokens at positions before that.
        """
        ...

    def step(self, pool: PagePool, works: Sequence[DecodeStep]) -> None:
        """Do a step, for rows of one kind after another: tokens, tables, lengths and the pool.

        All give back pages before any takes one. The pool has the pages, the tables the columns.
        """
        ...


OWN: Final[Mapping[str, str]] = MappingProxyType(
    {"triton": "kv_paging.triton_kernels", "torch": "kv_paging.torch_kernels"}
)


def select_page_kernels(
    layout: PageLayout, device: torch.device, name: str | None = None
) -> PageKernels:
    """Give the code for pages of a layout: that of a name, or the fastest that is there.

    What a name declines, as `declined` says, is done in torch.

    Raises:
        ValueError: there is none of that name, or it cannot be used on this machine.
    """
    if name is not None and (reason := _missing(name)) is not None:
        raise ValueError(f"page kernels {name!r} cannot be used here: {reason}")
    for each in _preferred(device) if name is None else (name,):
        if declined(each, layout, device) is None:
            return _load(each)
    return _load("torch")


def declined(name: str, layout: PageLayout, device: torch.device) -> str | None:
    """Say why pages of a layout go to torch and not to the kernels of a name; None if they do not.

    Raises:
        ValueError: there are none of that name.
    """
    reason = _missing(name)
    if reason is None and name != "torch":
        reason = import_module(_module(name)).declined(layout, device)
    return reason


def shared(each: Sequence[PageKernels]) -> PageKernels:
    """Give the kernels that all use, for what is done to all of them at once."""
    first = each[0]
    return first if all(one is first for one in each) else _load("torch")


def page_kernels_of(backend: str) -> str:
    """Return the name of the page kernels that write what a backend of attention reads."""
    registered = installed_backends().get(backend)
    has = backend in OWN or (registered is not None and registered.page_kernels is not None)
    return backend if has else "torch"


def _preferred(device: torch.device) -> list[str]:
    # Kernels in Triton are only taken by name, until a GPU has timed them.
    every = installed_backends().values()
    return [
        each.name
        for each in every
        if each.preferred and each.page_kernels is not None and device.type in each.devices
    ]


def _module(name: str) -> str:
    return OWN[name] if name in OWN else installed_backends()[name].page_kernels or OWN["torch"]


def _missing(name: str) -> str | None:
    if name == "torch":
        return None
    if name in OWN:
        reason: str | None = import_module(OWN[name]).missing()
        return reason
    found = installed_backends()
    if name not in found:
        known = ", ".join((*found, *OWN))
        raise ValueError(f"unknown page kernels {name!r}; choose one of {known}")
    if (reason := found[name].missing()) is None and found[name].page_kernels is None:
        reason = f"the backend {name!r} has none; its pages are written by 'torch'"
    return reason


def _load(name: str) -> PageKernels:
    return cast(PageKernels, import_module(_module(name)))  # a module is its functions
