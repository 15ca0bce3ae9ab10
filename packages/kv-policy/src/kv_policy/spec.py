"""The text form of a policy: `name[:key=value[,key=value...]]`, joined by `+`."""

from collections.abc import Iterable
from typing import Final

from kv_policy.compose import CompositionError, compose
from kv_policy.contract import KVPolicy
from kv_policy.part import Part, split
from kv_policy.registry import Registry

MOST_PARTS: Final = 16  # more than can be composed; so few still get a precise error message
LONGEST: Final = 1 << 16  # characters; file paths may have some thousands


def parse(text: str, extra: Iterable[type[Part]] = ()) -> KVPolicy:
    r"""Parse a policy's text form, for example `snapkv:budget=1024,window=32+k8v4`.

    A backslash escapes the next character of a value: `+`, `,`, another backslash, white space at
    an end, and the `n` of a string equal to "none". `str` of the result is the canonical text, and
    parsing that returns an equal policy.

    Args:
        text: the parts, joined by `+`.
        extra: policy classes that are not installed, parsed by their names. A parameter that names
            another policy, such as a format of `leankv`, accepts installed ones only.

    Raises:
        UnknownPolicyError: a name is not installed.
        BrokenPolicyError: two packages claim a name, or its package cannot be imported.
        CompositionError: the parts cannot be composed.
        ValueError: a malformed or very long text, an unknown or repeated key, a refused value, or a
            name in `extra` that is installed or given twice.
        TypeError: an item of `extra` is not a policy class, or has no name.
    """
    if len(text) > LONGEST:
        raise ValueError(
            f"the policy's text has {len(text):,} characters; at most {LONGEST:,} are read"
        )
    pieces = split(text, "+")
    if len(pieces) > MOST_PARTS:
        raise CompositionError(
            f"{len(pieces):,} policies are joined by +; at most a basis, two selectors and a "
            "format can be composed"
        )
    registry = Registry.scan().having(extra)
    return compose(*(_part(piece, registry) for piece in pieces))


def _part(text: str, registry: Registry) -> Part:
    name, options = read(text)
    return registry.load(name).from_text(options)


def read(text: str) -> tuple[str, dict[str, str]]:
    """Split the text of one part into its name and its parameter texts, still escaped.

    Raises:
        ValueError: the name is missing, a piece is not key=value, or a key is given twice.
    """
    name, *rest = split(text, ":", 1)
    name = name.strip()
    if not name:
        raise ValueError(
            "a policy's name is missing; write name[:key=value,...][+name...], for example "
            "snapkv:budget=1024+k8v4"
        )
    options: dict[str, str] = {}
    for item in split(rest[0], ",") if rest else []:
        key, *value = split(item, "=", 1)
        key = key.strip()
        if not key or not value:
            raise ValueError(f"{item!r} in {text!r} is not of the form key=value")
        if key in options:
            raise ValueError(f"{key!r} is given twice in {text!r}")
        options[key] = value[0]
    return name, options
