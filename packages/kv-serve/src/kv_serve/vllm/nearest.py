"""Names that were meant for kv-serve and that it does not know."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Final

PREFIX: Final = "kv_"  # of every name of kv-serve
OF_VLLM: Final = frozenset({"kv_transfer_params", "kv_hints"})  # names of vLLM that begin so
_ALIKE: Final = 0.85  # how alike two names are, from 0 to 1, where one is a misspelling


def strangers(
    given: Iterable[object], known: Sequence[str], near: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Give each name that is not known and was meant for kv-serve, with the nearest of `near`."""
    for name in given:
        if not isinstance(name, str) or name in known or name in OF_VLLM:
            continue
        plain = name.strip().lower().replace("-", "_")
        alike = get_close_matches(plain, near, n=1, cutoff=_ALIKE)
        if alike or plain.startswith(PREFIX):
            yield name, (alike or get_close_matches(plain, near, n=1, cutoff=0))[0]
