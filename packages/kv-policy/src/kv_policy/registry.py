"""Finding policies by name among everything that is installed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kv_policy.installing import install_command
from kv_policy.part import Part

GROUP: Final = "kv_policy"  # the entry point group that packages register their parts in


class UnknownPolicyError(ValueError):
    """No installed package has a policy of that name; the message names the nearest ones."""


class BrokenPolicyError(ValueError):
    """A policy is installed and cannot be used; the message names its package and says why."""


@dataclass(frozen=True, slots=True)
class Registry:
    """The policies of all installed packages, as one scan of their entry points found them.

    A name that two packages claim, or whose package cannot be imported, is refused when it is
    asked for; all other names work.
    """

    claims: Mapping[str, tuple[EntryPoint, ...]]  # by name, sorted; more than one: contested
    extra: Mapping[str, type[Part]] = field(default_factory=dict)  # by name, not installed

    @classmethod
    def scan(cls) -> "Registry":
        """Look at what is installed; nothing is imported."""
        return cls(claims(GROUP))

    def having(self, extra: Iterable[type[Part]]) -> "Registry":
        """Add policies that are not installed.

        Raises:
            TypeError: one is no subclass of Part, or has no name.
            ValueError: its name is installed, or another one's, whatever the case of letters.
        """
        found = dict(self.extra)
        for part in extra:
            if not (isinstance(part, type) and issubclass(part, Part)):
                raise TypeError(f"extra holds {part!r}; give classes that subclass kv_policy.Part")
            name = getattr(part, "name", None)
            if not isinstance(name, str):
                raise TypeError(
                    f"{part.__name__} has no name; set `name: ClassVar[str]` to what its text form "
                    "starts with"
                )
            for each, entries in self.claims.items():
                if each.casefold() == name.casefold():
                    raise ValueError(
                        f"{part.__name__} is named {name!r}, and so is a policy of "
                        f"{package_of(entries[0])}, which is installed; leave it out of extra if "
                        "it is that one, or give yours another name"
                    )
            for each, other in found.items():
                if each.casefold() == name.casefold() and other is not part:
                    raise ValueError(
                        f"{other.__name__} and {part.__name__} are both named {name!r}; give one "
                        "of them another name"
                    )
            found[name] = part
        return Registry(self.claims, found)

    def find(self, name: str) -> str:
        """Give the installed name that is meant, whatever the case of its letters.

        Raises:
            UnknownPolicyError: nothing of that name is installed.
        """
        known_names = sorted({*self.claims, *self.extra})
        if name in known_names:
            return name
        folded = [each for each in known_names if each.casefold() == name.casefold()]
        if len(folded) == 1:
            return folded[0]
        if get_close_matches(name.casefold(), known_names, 1, 0.5):
            near = get_close_matches(name.casefold(), known_names, 3, 0.3)
            known = f"the nearest of {len(known_names)} installed: {', '.join(near)}"
        else:
            known = f"installed policies: {', '.join(known_names) or 'none'}"
        raise UnknownPolicyError(f"no policy is called {name[:80]!r}; {known}")

    def load(self, name: str) -> type[Part]:
        """Import the policy of that name, whatever the case of its letters.

        Raises:
            UnknownPolicyError: nothing of that name is installed.
            BrokenPolicyError: two packages claim it, its package cannot be imported, or what is
                registered is no Part of that name.
        """
        name = self.find(name)
        if name in self.extra:
            return self.extra[name]
        part = imported(f"the policy {name!r}", self.claims[name])
        entry = self.claims[name][0]
        if not (isinstance(part, type) and issubclass(part, Part)):
            problem = "is not a Part"
        elif getattr(part, "name", None) != name:
            own = getattr(part, "name", None)
            problem = "has no name" if own is None else f"is named {own!r}"
        else:
            return part
        raise BrokenPolicyError(
            f"the policy {name!r} of {package_of(entry)} cannot be used: {entry.value} {problem}; "
            f"register a subclass of kv_policy.Part with `name: ClassVar[str] = {name!r}`"
        )


def claims(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Give the entry points of a group by name, sorted; those of equal values count once."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in sorted(entry_points(group=group), key=lambda e: (e.name, e.value)):
        found.setdefault(entry.name, {}).setdefault(entry.value, entry)
    return {name: tuple(each.values()) for name, each in found.items()}


def imported(what: str, entries: tuple[EntryPoint, ...]) -> object:
    """Import what one name is registered for.

    Args:
        what: the name, for messages, such as "the policy 'k8v4'".
        entries: those that claim it.

    Raises:
        BrokenPolicyError: two packages claim it, or its package cannot be imported.
    """
    if len(entries) > 1:
        both = " and ".join(f"{package_of(each)} ({each.value})" for each in entries)
        raise BrokenPolicyError(
            f"{len(entries)} installed packages claim {what}: {both}; uninstall all but one of them"
        )
    entry, package = entries[0], package_of(entries[0])
    try:
        found: object = entry.load()
    except (Exception, SystemExit) as error:  # somebody else's package may fail in any way
        why = f"{type(error).__name__}: {error}"
        again = "install it again"
        if entry.dist is not None:
            again = f"`{install_command(package, deps=False, again=True)}`"
        raise BrokenPolicyError(
            f"{what} of {package} cannot be loaded: {why}; {again}, in a version that goes with "
            "the rest"
        ) from error
    return found


def package_of(entry: EntryPoint) -> str:
    """Name the package that an entry point is of."""
    return entry.value.partition(":")[0] if entry.dist is None else entry.dist.name


def installed() -> dict[str, EntryPoint]:
    """Give the entry point of every installed policy, by name; nothing is imported.

    Of a name that two packages claim it is the first; `load` refuses that name.
    """
    return {name: entries[0] for name, entries in Registry.scan().claims.items()}


def load(name: str) -> type[Part]:
    """Import the policy of that name, whatever the case of its letters.

    Raises:
        UnknownPolicyError: nothing of that name is installed.
        BrokenPolicyError: as `Registry.load`.
    """
    return Registry.scan().load(name)
