"""Page kernels: the operations on the bytes of pages, and the choice of an implementation.

The kernels in torch support every device and format, and are the reference of the others. Those in
Triton, for GPUs, need the extra `triton`. Installed packages register more (`kv_policy.Backend`).
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Final, Protocol, cast, runtime_checkable

import torch
from jaxtyping import BFloat16, Bool, Float, Int, UInt8
from torch import Tensor

from kv_paging.pool import PagePool
from kv_paging.tokens import Stored, VectorNames
from kv_paging.work import DecodeStep, Recoding, TokenWrite
from kv_policy import Backend, PagedTokens, PageLayout, Running, installed_backends


@runtime_checkable
class PageKernels(Protocol):
    """Batched operations on the rows of a tier; the callers have checked the arguments.

    `pages` are all rows of a tier as PagedTokens of B = S sequences with a head each, over the
    memory of the whole pool, its scratch page last. `table_rows` names some of them, each once.
    """

    def write(self, pages: PagedTokens, tokens: TokenWrite) -> None:
        """Encode the marked tokens and write them, in order, to slots from start[i] on.

        The table has pages for all of them; if a format encodes several tokens together, they fill
        whole blocks. If a codec raises, slots before `start` are unchanged; with one token per
        table row, all slots are unchanged.
        """
        ...

    def recode(self, pages: PagedTokens, tokens: Recoding) -> None:
        """Encode stored tokens in the format of these pages, with their scores and positions.

        The result is that of `read` and `write`; if a codec raises, as there.
        """
        ...

    def place(
        self,
        data: UInt8[Tensor, "P nbytes"],
        layout: PageLayout,
        page: Int[Tensor, " n"],
        row: Int[Tensor, " n"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
    ) -> None:
        """Encode tokens and write each to its row of its page, in memory outside a pool.

        Pages and rows are by token and head, of the first n / H tokens. Each token is encoded
        separately, and pages store neither scores nor positions. If a codec raises, the pages are
        unchanged.
        """
        ...

    def compact(
        self, pages: PagedTokens, table_rows: Int[Tensor, " S"], stay: Bool[Tensor, "S R"]
    ) -> None:
        """Move the marked blocks past the new end into the gaps before it, in order.

        Bytes, scores and positions are copied unchanged (MoveCache, Algorithm 1 of KV-Compress).
        """
        ...

    def copy_pages(
        self, data: UInt8[Tensor, "P nbytes"], source: Int[Tensor, " n"], target: Int[Tensor, " n"]
    ) -> None:
        """Copy whole pages; no target is a source."""
        ...

    def read(
        self,
        pages: PagedTokens,
        table_rows: Int[Tensor, " S"],
        slots: int,
        vectors: VectorNames,
        start: Int[Tensor, " S"] | None = None,
    ) -> Stored:
        """Return the tokens in the first slots of table rows, or in those from `start` on."""
        ...

    def rescore(
        self, pages: PagedTokens, table_rows: Int[Tensor, " S"], score: Float[Tensor, "S L"]
    ) -> None:
        """Write new scores slot by slot, and 0 from slot L to the end of a row's last page."""
        ...

    def accumulate(
        self,
        pages: PagedTokens,
        table_rows: Int[Tensor, " S"],
        before: Int[Tensor, " S"],
        mass: Float[Tensor, "S L"],
        seen: Int[Tensor, "S L"],
        running: Running,
        position: Int[Tensor, "S L"] | None = None,
    ) -> None:
        """Update the scores of the first L slots, as `running.update`.

        A table row with `before` -1 is unchanged. `position` is given if pages store none.
        """
        ...

    def weakest(
        self,
        pages: PagedTokens,
        table_rows: Int[Tensor, " S"],
        slots: int,
        until: Int[Tensor, " S"] | None,
    ) -> tuple[Float[Tensor, " S"], Int[Tensor, " S"]]:
        """Return the lowest score in the first slots and the first slot with it, else inf and -1.

        With `until`, only tokens at earlier positions are considered.
        """
        ...

    def bound(
        self,
        pages: PagedTokens,
        count: Int[Tensor, " S"],
        both: BFloat16[Tensor, "*T _"] | UInt8[Tensor, "*T _"],
        most: int,
    ) -> None:
        """Compute the bounds of the keys in each row's full pages from page count[i] on.

        A bound is a channel's largest number in a page, and its smallest, rounded outwards. `both`
        are [S, T, 2 D] with columns for all full pages, or [P, 2 D] by the number of a page, where
        several rows may hold it; the bounds of other pages are left as they are. `most` is about
        how many pages of a row have none. If `both` are uint8, they are the codes of keys instead
        (`kv_policy.key_codes`).
        """
        ...

    def step(self, pool: PagePool, works: Sequence[DecodeStep]) -> None:
        """Apply a decode step, by kind of rows: update tokens, tables, lengths and the pool.

        All kinds release pages before any allocates one. The pool has the pages, the tables the
        columns.
        """
        ...


OWN: Final[Mapping[str, str]] = MappingProxyType(
    {"triton": "kv_paging.triton_kernels", "torch": "kv_paging.torch_kernels"}
)
# The built-in attention backends; a registration of such a name is ignored here as there.
BUILT_IN: Final = ("reference", *OWN)


def select_page_kernels(
    layout: PageLayout, device: torch.device, name: str | None = None
) -> PageKernels:
    """Return the page kernels with this name for a layout, or the fastest available ones.

    Layouts that these kernels decline, as in `declined`, use torch.

    Raises:
        ValueError: the name is unknown, or unavailable on this machine.
    """
    if name is not None and (reason := _missing(name)) is not None:
        raise ValueError(f"page kernels {name!r} cannot be used here: {reason}")
    for each in _preferred(device) if name is None else (name,):
        if declined(each, layout, device) is None:
            return _load(each)
    return _load("torch")


def declined(name: str, layout: PageLayout, device: torch.device) -> str | None:
    """Return why the kernels with this name do not support a layout; None if they do.

    Raises:
        ValueError: the name is unknown.
    """
    reason = _missing(name)
    if reason is None and name != "torch":
        reason = import_module(_module(name)).declined(layout, device)
    return reason


def can_capture_pages(name: str, layout: PageLayout, device: torch.device) -> bool:
    """Return whether launches of the kernels with this name may be captured in a CUDA graph.

    Those in Triton wait for nothing, and no size depends on data.

    Raises:
        ValueError: the name is unknown.
    """
    return name == "triton" and declined(name, layout, device) is None


def shared(each: Sequence[PageKernels]) -> PageKernels:
    """Return the kernels that all have in common, for operations on all of them at once."""
    first = each[0]
    return first if all(one is first for one in each) else _load("torch")


def page_kernels_of(backend: str) -> str:
    """Return the name of the page kernels for an attention backend."""
    registered = _registered().get(backend)
    has = backend in OWN or (registered is not None and registered.page_kernels is not None)
    return backend if has else "torch"


def _preferred(device: torch.device) -> list[str]:
    on_gpu = device.type == "cuda" and _missing("triton") is None
    registered = [
        each.name
        for each in _registered().values()
        if each.preferred and each.page_kernels is not None and each.supports(device.type)
    ]
    return ["triton", *registered] if on_gpu else registered


def _registered() -> dict[str, Backend]:
    return {name: each for name, each in installed_backends().items() if name not in BUILT_IN}


def _module(name: str) -> str:
    return OWN[name] if name in OWN else _registered()[name].page_kernels or OWN["torch"]


def _missing(name: str) -> str | None:
    if name == "torch":
        return None
    if name in OWN:
        reason: str | None = import_module(OWN[name]).missing()
        return reason
    found = _registered()
    if name not in found:
        known = ", ".join((*found, *OWN))
        raise ValueError(f"unknown page kernels {name!r}; choose one of {known}")
    if (reason := found[name].missing()) is None and found[name].page_kernels is None:
        reason = f"the backend {name!r} has none; its pages are written by 'torch'"
    return reason


def _load(name: str) -> PageKernels:
    return cast(PageKernels, import_module(_module(name)))  # a module of functions
