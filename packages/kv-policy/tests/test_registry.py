from importlib.metadata import EntryPoint

import pytest

from kv_policy import (
    BrokenPolicyError,
    CompositionError,
    Part,
    Raw,
    UnknownPolicyError,
    installed,
    load,
    parse,
    registry,
)


def use(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    made = [EntryPoint(name, value, "kv_policy") for name, value in entries]
    monkeypatch.setattr(registry, "entry_points", lambda group: made)


def test_this_package_registers_raw() -> None:
    assert installed()["raw"].value == "kv_policy.raw:Raw"
    assert load("raw") is Raw


def test_listing_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ("b", "no_such_module:B"), ("a", "no_such_module:A"))
    assert list(installed()) == ["a", "b"]


def test_a_name_claimed_twice_is_refused_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ("k8v4", "one:K8V4"), ("raw", "kv_policy.raw:Raw"), ("k8v4", "other:Int"))
    assert list(installed()) == ["k8v4", "raw"]
    assert load("raw") is Raw
    both = r"2 installed packages claim the policy 'k8v4': one \(one:K8V4\) and other \(other:Int\)"
    with pytest.raises(BrokenPolicyError, match=both):
        load("k8v4")
    with pytest.raises(BrokenPolicyError, match="uninstall all but one"):
        parse("raw+k8v4")


@pytest.mark.parametrize("error", [ImportError, SystemExit, OSError], ids=lambda e: e.__name__)
def test_a_package_that_fails_is_named_and_no_other_fails(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fails(self: EntryPoint) -> object:
        if self.name == "raw":
            return Raw
        raise error("libmissing.so")

    use(monkeypatch, ("bad", "theirs.policy:Bad"), ("raw", "kv_policy.raw:Raw"))
    monkeypatch.setattr(EntryPoint, "load", fails)
    assert str(parse("raw")) == "raw"
    with pytest.raises(
        BrokenPolicyError,
        match=f"'bad' of theirs.policy cannot be loaded: {error.__name__}: libmissing.so; re",
    ):
        parse("bad")


@pytest.mark.parametrize("given", ["RAW", "Raw", "raw"])
def test_the_case_of_letters_does_not_matter(given: str) -> None:
    assert str(parse(given)) == "raw"


def test_the_nearest_three_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("kv-compress", "k8v4", "k4v4", "k8v8", "snapkv", "ada-snapkv", "streaming", "palu")
    use(monkeypatch, *((name, "kv_policy.raw:Raw") for name in names))
    with pytest.raises(UnknownPolicyError, match=r"the nearest of 8 installed: snapkv, ada-snapkv"):
        load("SnapVK")
    with pytest.raises(UnknownPolicyError, match=r"'kv-compres'; the nearest of 8 .*: kv-compress"):
        load("kv-compres")
    with pytest.raises(UnknownPolicyError, match=r"installed: k8v8, k8v4, k4v4$"):
        load("K8V5")


def test_entry_points_are_scanned_once_for_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    scans = []

    def scan(group: str) -> list[EntryPoint]:
        scans.append(group)
        return [EntryPoint("raw", "kv_policy.raw:Raw", group)]

    monkeypatch.setattr(registry, "entry_points", scan)
    with pytest.raises(CompositionError, match="both define how tokens are stored"):
        parse("+".join(["raw"] * 16))
    assert len(scans) == 1
    with pytest.raises(CompositionError, match="16,000 policies are joined by"):
        parse("+".join(["raw"] * 16000))
    with pytest.raises(ValueError, match="has 79,999 characters; at most 65,536 are read"):
        parse("+".join(["raw"] * 20000))
    assert len(scans) == 1


def test_a_class_without_a_name_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ("part", "kv_policy.part:Part"))
    with pytest.raises(BrokenPolicyError, match=r"kv_policy\.part:Part has no name; register"):
        load("part")
    with pytest.raises(TypeError, match="Part has no name; set `name: ClassVar"):
        Part()


def test_one_distribution_seen_twice_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ("raw", "kv_policy.raw:Raw"), ("raw", "kv_policy.raw:Raw"))
    assert load("raw") is Raw


def test_an_empty_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    with pytest.raises(UnknownPolicyError, match="installed policies: none"):
        load("raw")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("raw2", "kv_policy.raw:Raw"),
        ("codec", "kv_policy.raw:RawCodec"),
        ("function", "kv_policy.spec:parse"),
    ],
)
def test_what_is_not_a_part_of_that_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    use(monkeypatch, (name, value), ("raw", "kv_policy.raw:Raw"))
    with pytest.raises(BrokenPolicyError, match=f"cannot be used: {value} is (not a Part|named)"):
        load(name)
    assert load("raw") is Raw
