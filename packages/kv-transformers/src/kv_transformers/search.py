"""A search over policies on the user's own model, which another package supplies.

Its function is the entry point `policies` of the group `kv_transformers.search`; kv-eval has one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, cast

from kv_transformers.recommend import Wish

GROUP: Final = "kv_transformers.search"
PACKAGE: Final = "kv-eval"  # supplies it


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What is searched, and how.

    Attributes:
        model: a name, as on the command line; None: the default.
        dtype: of the model.
        device: a torch device; None: the first GPU, or the CPU.
        backend: of attention.
        wish: what is asked of a policy.
        policies: text forms to try, with alternatives in braces; empty: what is installed.
        text: a UTF-8 file to read; None: Python's help topics.
        length: tokens of a prompt.
        continuation: tokens scored after each prompt.
        windows: prompts at most.
        numbers: hidden numbers to be found in each task; 0: none.
        precision: half-width of the interval at which the search ends, in nats per token.
        json: file of the result; finished samples are in a file beside it.
    """

    model: str | None
    dtype: str
    device: str | None
    backend: str
    wish: Wish
    policies: tuple[str, ...]
    text: Path | None
    length: int
    continuation: int
    windows: int
    numbers: int
    precision: float
    json: Path


Search = Callable[[SearchOptions], None]


def installed() -> Search | None:
    """Return the search of an installed package; None if there is none.

    Raises:
        BrokenPolicyError: several packages supply one, or it cannot be imported.
        TypeError: the entry point is not a function.
    """
    from kv_policy.registry import imported

    found = {entry.value: entry for entry in entry_points(group=GROUP, name="policies")}
    if not found:
        return None
    search = imported("the search over policies", tuple(found.values()))
    if not callable(search):
        raise TypeError(f"the entry point policies of {GROUP} is {search!r}; it must be a function")
    return cast(Search, search)
