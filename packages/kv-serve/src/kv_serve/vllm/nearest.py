"""Detection of unknown names that were meant for kv-serve."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Final

PREFIX: Final = "kv_"  # prefix of every name of kv-serve
OF_VLLM: Final = frozenset({"kv_transfer_params", "kv_hints"})  # names of vLLM with this prefix
_ALIKE: Final = 0.85  # similarity, from 0 to 1, from which a name counts as a misspelling


def strangers(
    given: Iterable[object], known: Sequence[str], near: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield each unknown name that was meant for kv-serve, with the nearest of `near`."""
    for name in given:
        if not isinstance(name, str) or name in known or name in OF_VLLM:
            continue
        plain = name.strip().lower().replace("-", "_")
        alike = get_close_matches(plain, near, n=1, cutoff=_ALIKE)
        if alike or plain.startswith(PREFIX):
            yield name, (alike or get_close_matches(plain, near, n=1, cutoff=0))[0]
