"""Finding policies by name among everything that is installed."""

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kv_policy.part import Part

GROUP: Final = "kv_policy"  # the entry point group that packages register their parts in


class UnknownPolicyError(ValueError):
    """No installed package has a policy of that name; the message lists those there are."""


def installed() -> dict[str, EntryPoint]:
    """Give the entry point of every installed policy, by name; nothing is imported.

    Raises:
        ValueError: two installed packages claim the same name.
    """
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ValueError(
                f"two installed packages claim the policy {entry.name!r}: {other.value} and "
                f"{entry.value}; uninstall one of them"
            )
    return found


def load(name: str) -> type[Part]:
    """Import the policy of that name.

    Raises:
        UnknownPolicyError: nothing of that name is installed.
        TypeError: the entry point is not a Part, or carries another name.
    """
    found = installed()
    if name not in found:
        names = ", ".join(found) or "none"
        raise UnknownPolicyError(f"no policy is called {name!r}; installed policies: {names}")
    part = found[name].load()
    if not (isinstance(part, type) and issubclass(part, Part)) or part.name != name:
        raise TypeError(f"entry point {name} = {found[name].value} is not a Part named {name!r}")
    return part
