"""The base class of every named part of a policy text."""

import dataclasses
import re
import types
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from kv_policy.budget import Budget
from kv_policy.contract import Basis, Capabilities, Formats, Selector
from kv_policy.reading import PageReading

KEEP: Final = "keep"  # the parameter that sets the kept share of any part with an amount


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a part: what `kv-serve policies NAME` prints."""

    name: str
    type: str
    default: str
    doc: str


@dataclass(frozen=True)
class Part:
    """A named, frozen set of parameters that supplies one or more facets of a policy.

    Subclass it as a frozen dataclass, set `name` and `source`, annotate fields with
    `Annotated[int, Meta(ge=1, description="...")]`, and define the facets it supplies. A parameter
    is a bool, int, float, string, `Literal` or Budget, or one of these or None. Parameters are
    checked at construction, from Python or from text. A part alone is a KVPolicy.
    """

    name: ClassVar[str]
    source: ClassVar[str] = ""
    amounts: ClassVar[tuple[str, ...]] = ()  # parameters that `keep` can replace
    amount_of: ClassVar[str] = "tokens seen"  # the whole that `keep` is a share of
    variants: ClassVar[tuple[str, ...]] = ("",)  # parameters that a search tries, as text, or none

    def __post_init__(self) -> None:
        """Check every parameter against its annotation.

        Raises:
            ValueError: a value has the wrong type or is out of range.
            TypeError: the class has no name.
        """
        if not isinstance(getattr(type(self), "name", None), str):
            raise TypeError(
                f"{type(self).__name__} has no name; set `name: ClassVar[str]` to the first word "
                "of its text form"
            )
        for key, hint in _hints(type(self)).items():
            value = getattr(self, key)
            try:
                object.__setattr__(self, key, _checked(value, hint))  # a float field turns 1 to 1.0
            except ValueError as error:
                meant = self._meant(key, str(value))
                raise ValueError(
                    f"{self.name}: {key}={value!r} is refused: {error}{meant}"
                ) from None

    @property
    def selector(self) -> Selector | None:
        """Token selection, if this part supplies it."""
        return None

    @property
    def formats(self) -> Formats | None:
        """Storage formats of the tiers, if this part supplies them."""
        return None

    @property
    def basis(self) -> Basis | None:
        """Basis of the stored vectors, if this part supplies it."""
        return None

    @property
    def reading(self) -> PageReading | None:
        """The pages that a decode step reads, if this part limits them."""
        return None

    @property
    def capabilities(self) -> Capabilities:
        """What a cache under this part supports."""
        return Capabilities()

    @property
    def fitted_to(self) -> str | None:
        """Fingerprint of the model this part was calibrated with; None: it fits any model."""
        return None

    @classmethod
    def facets(cls) -> tuple[str, ...]:
        """Return which of `selector`, `formats`, `basis` and `reading` the class supplies."""
        every = ("selector", "formats", "basis", "reading")
        return tuple(each for each in every if getattr(cls, each) is not getattr(Part, each))

    @classmethod
    def keeping(cls, share: Budget) -> dict[str, Any]:
        """Return the parameters that `keep` with this percentage sets.

        A part with `amounts` must define it.
        """
        raise TypeError(f"{cls.__name__} must define keeping(share)")

    @classmethod
    def from_text(cls, options: dict[str, str]) -> "Part":
        """Create the part from the key=value texts of its text form.

        If it has `amounts`, `keep=25%` can replace one of them.

        Raises:
            ValueError: an unknown key (the message lists the valid ones), a missing key, or a value
                that cannot be converted.
        """
        hints = _hints(cls)
        values: dict[str, Any] = {}
        for key, text in options.items():
            if key == KEEP and cls._keeps():
                values |= cls.keeping(cls._share(options))
                continue
            if key not in hints:
                known = ", ".join(parameter.name for parameter in cls.parameters()) or "none"
                raise ValueError(f"{cls.name} has no parameter {key!r}; its parameters: {known}")
            try:
                values[key] = _read(text, hints[key])
            except ValueError as error:
                meant = cls._meant(key, text)
                raise ValueError(f"{cls.name}: {key}={text} is refused: {error}{meant}") from None
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in values:
                raise ValueError(f"{cls.name} needs {field.name}=..., which has no default")
        return cls(**values)

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        """Return the parameters in order, with their defaults as text; `keep` is last."""
        hints = _hints(cls)
        instead = " or ".join(cls.amounts)
        keep = Parameter(
            KEEP, "%", "none", f"share of the {cls.amount_of} that is kept, instead of {instead}"
        )
        return (
            *(
                Parameter(f.name, _type_name(hints[f.name]), _default(f), _doc(hints[f.name]))
                for f in dataclasses.fields(cls)
            ),
            *(keep,) * cls._keeps(),
        )

    @classmethod
    def _keeps(cls) -> bool:
        """Whether the part accepts `keep` and has no parameter of that name itself."""
        return bool(cls.amounts) and KEEP not in _hints(cls)

    @classmethod
    def _share(cls, options: dict[str, str]) -> Budget:
        """Return the share in `keep`.

        Raises:
            ValueError: it is not a percentage, or another parameter sets the amount too.
        """
        text = strip(options[KEEP])
        try:
            share = Budget.parse(text)
        except ValueError:
            share = Budget(1)
        if share.unit != "percent":
            raise ValueError(
                f"{cls.name}: {KEEP}={text} is refused: it is a share of the {cls.amount_of}, from "
                f"above 0% to 100%{cls._meant(KEEP, text)}"
            )
        for other in cls.amounts:
            if other in options:
                raise ValueError(
                    f"{cls.name}: {KEEP}={text} and {other}={options[other]} both set how much is "
                    "kept; use one of them"
                )
        return share

    @classmethod
    def _meant(cls, key: str, text: str) -> str:
        """Return a hint with the probably intended value of a refused number; else empty."""
        number = re.fullmatch(r"(\d*\.?\d+)(%?)", strip(text))
        if not cls._keeps() or key not in (KEEP, *cls.amounts) or number is None:
            return ""
        value, percent = float(number[1]), bool(number[2])
        if percent and key != KEEP:
            return f"; write the kept share of the {cls.amount_of} as {KEEP}=25%"
        if key == KEEP and value > 1:
            share = value / 100  # keep=25
        elif key == "rate" and value > 1:
            share = 1 / value  # rate=4, where rate is a compression ratio
        else:
            share = value  # budget=0.25, or rate=0.25 as the kept share
        if percent or not 0 < share < 1:
            return ""
        return f"; to keep {share:.4g} of the {cls.amount_of} write {KEEP}={100 * share:.4g}%"

    def __str__(self) -> str:
        """Return the canonical text: the name, then the parameters that differ from defaults."""
        changed = [
            f"{f.name}={_write(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name


def split(text: str, mark: str, limit: int = -1) -> list[str]:
    r"""Split at an unescaped mark; a backslash escapes the next character.

    >>> split(r"a\+b+c", "+") == [r"a\+b", "c"]
    True
    """
    pieces, start, i = [], 0, 0
    while i < len(text) and limit != 0:
        if text[i] == "\\":
            i += 1
        elif text[i] == mark:
            pieces.append(text[start:i])
            start = i + 1
            limit -= 1
        i += 1
    return [*pieces, text[start:]]


def strip(text: str) -> str:
    r"""Strip unescaped white space from both ends.

    >>> strip(r" a\  ") == r"a\ "
    True
    """
    kept = text.strip()
    backslashes = len(kept) - len(kept.rstrip("\\"))
    end = text.find(kept) + len(kept)
    return kept + text[end : end + backslashes % 2]


def _hints(cls: type[Part]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(cls)}
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint for name, hint in hints.items() if name in names}


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _choices(hint: Any) -> tuple[Any, ...]:
    plain = _plain(hint)
    return get_args(plain) if get_origin(plain) in (Union, types.UnionType) else (plain,)


def _checked(value: Any, hint: Any) -> Any:
    if value is None and type(None) in _choices(hint):
        return None
    if Budget not in _choices(hint):
        return _converted(value, hint)
    if not isinstance(value, Budget):
        raise ValueError("expected a Budget, such as Budget(1024)")
    return value


def _read(text: str, hint: Any) -> Any:
    text = strip(text)
    if text == "none" and type(None) in _choices(hint):
        return None
    raw = re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
    if Budget in _choices(hint):
        return Budget.parse(raw)
    return _converted(raw, hint, strict=str in map(_plain, _choices(hint)))


def _converted(value: Any, hint: Any, strict: bool = True) -> Any:
    try:
        return msgspec.convert(value, hint, strict=strict)
    except msgspec.ValidationError:
        words = _plain(hint)
        if get_origin(words) is not Literal:
            raise
        raise ValueError(f"use one of {', '.join(map(str, get_args(words)))}") from None


def _write(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if value == "none":
        return "\\none"
    text = repr(value) if isinstance(value, float) else str(value)
    return re.sub(r"[\\+,]|^\s|\s\Z", r"\\\g<0>", text)


def _default(field: "dataclasses.Field[Any]") -> str:
    return "required" if field.default is dataclasses.MISSING else _write(field.default)


def _doc(hint: Any) -> str:
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((m.description for m in metas if isinstance(m, msgspec.Meta) and m.description), "")


def _type_name(hint: Any) -> str:
    names = {Budget: "tokens, % or B", type(None): "none"}
    return " | ".join(
        names.get(choice) or " | ".join(map(str, get_args(choice))) or choice.__name__
        for choice in map(_plain, _choices(hint))
    )
