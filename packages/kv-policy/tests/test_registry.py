from importlib.metadata import EntryPoint

import pytest

from kv_policy import Raw, UnknownPolicyError, installed, load, registry


def use(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    made = [EntryPoint(name, value, "kv_policy") for name, value in entries]
    monkeypatch.setattr(registry, "entry_points", lambda group: made)


def test_this_package_registers_raw() -> None:
    assert installed()["raw"].value == "kv_policy.raw:Raw"
    assert load("raw") is Raw


def test_listing_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ("b", "no_such_module:B"), ("a", "no_such_module:A"))
    assert list(installed()) == ["a", "b"]


def test_a_name_claimed_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ("k8v4", "one:K8V4"), ("raw", "kv_policy.raw:Raw"), ("k8v4", "other:Int"))
    with pytest.raises(
        ValueError, match="two installed packages claim the policy 'k8v4': one:K8V4"
    ):
        installed()
    with pytest.raises(ValueError, match="uninstall one of them"):
        load("raw")


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
    use(monkeypatch, (name, value))
    with pytest.raises(TypeError, match=f"entry point {name} = {value} is not a Part named"):
        load(name)
