"""The registry: policies of all installed packages, by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kv_policy.installing import install_command
from kv_policy.part import Part

GROUP: Final = "kv_policy"  # the entry point group of parts


class UnknownPolicyError(ValueError):
    """The policy name is not installed; the message lists the nearest names."""


class BrokenPolicyError(ValueError):
    """An installed policy cannot be used; the message names its package and the reason."""


@dataclass(frozen=True, slots=True)
class Registry:
    """The policies of all installed packages, found in one scan of their entry points.

    A name that two packages claim, or whose package cannot be imported, fails when it is loaded;
    other names are unaffected.
    """

    claims: Mapping[str, tuple[EntryPoint, ...]]  # by name, sorted; several entries: a conflict
    extra: Mapping[str, type[Part]] = field(default_factory=dict)  # by name, not installed

    @classmethod
    def scan(cls) -> "Registry":
        """Scan the installed entry points without importing them."""
        return cls(claims(GROUP))

    def having(self, extra: Iterable[type[Part]]) -> "Registry":
        """Add policies that are not installed.

        Raises:
            TypeError: a class is not a subclass of Part, or has no name.
            ValueError: a name is already installed or given twice; letter case is ignored.
        """
        found = dict(self.extra)
        for part in extra:
            if not (isinstance(part, type) and issubclass(part, Part)):
                raise TypeError(f"extra holds {part!r}; use subclasses of kv_policy.Part")
            name = getattr(part, "name", None)
            if not isinstance(name, str):
                raise TypeError(
                    f"{part.__name__} has no name; set `name: ClassVar[str]` to the first word of "
                    "its text form"
                )
            for each, entries in self.claims.items():
                if each.casefold() == name.casefold():
                    raise ValueError(
                        f"{part.__name__} is named {name!r}, which the installed package "
                        f"{package_of(entries[0])} already uses; remove it from extra if it is the "
                        "same policy, else rename it"
                    )
            for each, other in found.items():
                if each.casefold() == name.casefold() and other is not part:
                    raise ValueError(
                        f"{other.__name__} and {part.__name__} are both named {name!r}; rename one "
                        "of them"
                    )
            found[name] = part
        return Registry(self.claims, found)

    def find(self, name: str) -> str:
        """Return the installed name that matches, ignoring letter case.

        Raises:
            UnknownPolicyError: the name is not installed.
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
        raise UnknownPolicyError(f"unknown policy {name[:80]!r}; {known}")

    def load(self, name: str) -> type[Part]:
        """Import the policy with this name, ignoring letter case.

        Raises:
            UnknownPolicyError: the name is not installed.
            BrokenPolicyError: two packages claim the name, its package cannot be imported, or the
                registered object is not a Part with that name.
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
    """Return the entry points of a group by name, sorted; entries with equal values count once."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in sorted(entry_points(group=group), key=lambda e: (e.name, e.value)):
        found.setdefault(entry.name, {}).setdefault(entry.value, entry)
    return {name: tuple(each.values()) for name, each in found.items()}


def imported(what: str, entries: tuple[EntryPoint, ...]) -> object:
    """Import the object registered for one name.

    Args:
        what: the name for messages, such as "the policy 'k8v4'".
        entries: the entry points that claim it.

    Raises:
        BrokenPolicyError: two packages claim the name, or its package cannot be imported.
    """
    if len(entries) > 1:
        both = " and ".join(f"{package_of(each)} ({each.value})" for each in entries)
        raise BrokenPolicyError(
            f"{len(entries)} installed packages claim {what}: {both}; uninstall all but one of them"
        )
    entry, package = entries[0], package_of(entries[0])
    try:
        found: object = entry.load()
    except (Exception, SystemExit) as error:  # third-party code may fail in any way
        why = f"{type(error).__name__}: {error}"
        again = "reinstall it"
        if entry.dist is not None:
            again = f"`{install_command(package, deps=False, again=True)}`"
        raise BrokenPolicyError(
            f"{what} of {package} cannot be loaded: {why}; {again}, in a version compatible with "
            "the other packages"
        ) from error
    return found


def package_of(entry: EntryPoint) -> str:
    """Return the name of the package that an entry point belongs to."""
    return entry.value.partition(":")[0] if entry.dist is None else entry.dist.name


def installed() -> dict[str, EntryPoint]:
    """Return the entry point of every installed policy by name, without importing any.

    If two packages claim a name the first is returned; `load` refuses that name.
    """
    return {name: entries[0] for name, entries in Registry.scan().claims.items()}


def load(name: str) -> type[Part]:
    """Import the policy with this name, ignoring letter case.

    Raises:
        UnknownPolicyError: the name is not installed.
        BrokenPolicyError: see `Registry.load`.
    """
    return Registry.scan().load(name)
