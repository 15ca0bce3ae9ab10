"""Argument checks before anything changes, with the messages of their exceptions."""

import torch
from torch import Tensor


class PoolExhausted(RuntimeError):
    """More pages were requested than are free, and the pool may not grow; nothing has changed."""

    def __init__(self, needed: int, free: int) -> None:
        """Record the needed and the free pages."""
        super().__init__(
            f"{needed} pages are needed and {free} are free; give the pool more pages, keep fewer "
            "tokens, or finish a sequence first"
        )
        self.needed = needed
        self.free = free


def expect_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """Raise if a tensor has another shape; None matches any size.

    Raises:
        ValueError: the shape differs; the message has both.
    """
    fits = tensor.ndim == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; it must be ({wanted})")


def expect_field(name: str, tensor: Tensor | None, stored: bool, *shape: int) -> None:
    """Raise if scores or positions are given but not stored in pages, or vice versa.

    Raises:
        ValueError: the argument and the layout disagree, or the shape differs.
    """
    if tensor is None:
        if stored:
            raise ValueError(f"pages hold a {name} per token and none is given; give {name}")
    elif not stored:
        raise ValueError(f"a {name} is given and pages of this layout hold none; give None")
    else:
        expect_shape(name, tensor, *shape)


def expect_cover(name: str, slots: int, longest: int) -> None:
    """Raise if a tensor has fewer slots than the longest table row.

    Raises:
        ValueError: some slots are not covered.
    """
    if slots < longest:
        raise ValueError(
            f"{name} covers {slots} slots and the longest of the rows holds {longest} tokens; "
            "it must cover all of them, as returned by read"
        )


def expect_within(name: str, tensor: Tensor, most: int) -> None:
    """Raise if any number is outside 0 to `most`.

    Raises:
        ValueError: a number is out of range; the message has the first one.
    """
    strange = tensor[(tensor < 0) | (tensor > most)]
    if strange.numel():
        raise ValueError(f"{name} {int(strange[0])} is out of range; it must be from 0 to {most}")


def expect_sizes(page_bytes: int, pages: int, grows: bool) -> None:
    """Raise if the sizes of a pool are invalid.

    Raises:
        ValueError: a page of no bytes, a negative number of pages, or none in a fixed pool.
    """
    if page_bytes < 1:
        raise ValueError(f"a page of {page_bytes} bytes stores nothing; give it at least 1")
    if pages < (0 if grows else 1):
        raise ValueError(
            f"a pool of {pages} pages is too small; give it at least "
            f"{0 if grows else 1}, or let it grow"
        )


def expect_memory(data: Tensor) -> None:
    """Raise if a tensor cannot be the pages of a pool and its scratch page.

    Raises:
        ValueError: fewer than two rows, overlapping or non-contiguous rows, or no bytes.
    """
    if data.dtype != torch.uint8 or data.ndim != 2 or len(data) < 2 or data.shape[1] < 1:
        raise ValueError(
            f"the memory is {data.dtype} of shape {tuple(data.shape)}; give it as uint8 of "
            "shape (pages + 1, bytes of a page), with at least one page"
        )
    if data.stride(1) != 1 or data.stride(0) < data.shape[1]:
        raise ValueError(
            f"the memory has the strides {data.stride()}; each page of {data.shape[1]} bytes "
            "must be contiguous and must not overlap another"
        )


def expect_each_once(free: Tensor, held: Tensor, pages: int) -> None:
    """Check that free and held pages together are all pages, each exactly once.

    Raises:
        RuntimeError: a page is missing or occurs twice.
    """
    everywhere = torch.cat((free, held))
    strange = everywhere[(everywhere < 0) | (everywhere >= pages)]
    if len(strange):
        raise RuntimeError(f"page {int(strange[0])} does not exist; there are {pages}")
    places = torch.bincount(everywhere, minlength=pages)
    wrong = (places != 1).nonzero()
    if len(wrong):
        page = int(wrong[0, 0])
        raise RuntimeError(
            f"page {page} occurs {int(places[page])} times; every page must be either free or held "
            f"once ({len(free)} are free, {len(held)} are listed as held, {pages} exist)"
        )
