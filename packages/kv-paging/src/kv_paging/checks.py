"""What is refused before anything changes, each with a sentence."""

import torch
from torch import Tensor


class PoolExhausted(RuntimeError):
    """More pages were asked for than are free, and the pool may not grow; nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        """Say how many pages were needed and how many there were."""
        super().__init__(
            f"{needed} pages are needed and {free} are free; give the pool more pages, keep fewer "
            "tokens, or finish a sequence first"
        )
        self.needed = needed
        self.free = free


def expect_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """Refuse a tensor of another shape; None stands for any size.

    Raises:
        ValueError: the shape differs; both are named.
    """
    fits = tensor.ndim == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; it must be ({wanted})")


def expect_field(name: str, tensor: Tensor | None, stored: bool, *shape: int) -> None:
    """Refuse scores or positions that pages do not hold, and their absence where pages do.

    Raises:
        ValueError: what is given and what pages hold do not agree, or the shape differs.
    """
    if tensor is None:
        if stored:
            raise ValueError(f"pages hold a {name} per token and none is given; give {name}")
    elif not stored:
        raise ValueError(f"a {name} is given and pages of this layout hold none; give None")
    else:
        expect_shape(name, tensor, *shape)


def expect_cover(name: str, slots: int, longest: int) -> None:
    """Refuse a tensor over fewer slots than the longest table row fills.

    Raises:
        ValueError: some slots would have no answer.
    """
    if slots < longest:
        raise ValueError(
            f"{name} covers {slots} slots and the longest of the rows holds {longest} tokens; "
            "it must cover all of them, as read gives them"
        )


def expect_within(name: str, tensor: Tensor, most: int) -> None:
    """Refuse numbers that are not from 0 to `most`.

    Raises:
        ValueError: one is not; the first such is named.
    """
    strange = tensor[(tensor < 0) | (tensor > most)]
    if strange.numel():
        raise ValueError(f"{name} {int(strange[0])} is out of range; it must be from 0 to {most}")


def expect_sizes(page_bytes: int, pages: int, grows: bool) -> None:
    """Refuse a pool that can serve nobody.

    Raises:
        ValueError: a page of no bytes, fewer than no pages, or none in a pool that cannot grow.
    """
    if page_bytes < 1:
        raise ValueError(f"a page of {page_bytes} bytes holds nothing; give it at least 1")
    if pages < (0 if grows else 1):
        raise ValueError(
            f"a pool of {pages} pages cannot serve anybody; give it at least "
            f"{0 if grows else 1}, or let it grow"
        )


def expect_memory(data: Tensor) -> None:
    """Refuse what cannot be the pages of a pool and its scratch page.

    Raises:
        ValueError: fewer than two rows, rows that overlap or are not runs, or no bytes.
    """
    if data.dtype != torch.uint8 or data.ndim != 2 or len(data) < 2 or data.shape[1] < 1:
        raise ValueError(
            f"the memory is {data.dtype} of shape {tuple(data.shape)}; give it as uint8 of "
            "shape (pages + 1, bytes of a page), with a page at least"
        )
    if data.stride(1) != 1 or data.stride(0) < data.shape[1]:
        raise ValueError(
            f"the memory has the strides {data.stride()}; each page of {data.shape[1]} bytes "
            "must be a run of its own"
        )


def expect_each_once(free: Tensor, held: Tensor, pages: int) -> None:
    """Check that free pages and held ones are all pages, each exactly once.

    Raises:
        RuntimeError: a page is missing, or is in two places.
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
            f"page {page} is in {int(places[page])} places; every page is either free or held "
            f"once ({len(free)} are free, {len(held)} are named as held, {pages} exist)"
        )
