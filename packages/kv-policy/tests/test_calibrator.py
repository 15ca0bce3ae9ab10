"""Loading calibrators by name."""

from importlib.metadata import EntryPoint

import pytest

from kv_policy import (
    BrokenPolicyError,
    calibrator,
    load_calibrator,
    load_head_calibrator,
    load_level_calibrator,
    registry,
)


def use(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    made = [EntryPoint(name, value, calibrator.CALIBRATION) for name, value in entries]
    monkeypatch.setattr(registry, "entry_points", lambda group: made)


def test_one_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ("mine", "kv_policy.shape:CacheShape"), ("other", "no_such_module:B"))
    assert load_calibrator("mine").__name__ == "CacheShape"


def test_one_distribution_seen_twice_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, *[("mine", "kv_policy.shape:CacheShape")] * 2)
    assert load_calibrator("mine").__name__ == "CacheShape"


def test_an_unknown_name_lists_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ("b", "one:B"), ("a", "one:A"))
    with pytest.raises(ValueError, match="unknown calibration 'c'; choose one of: a, b"):
        load_calibrator("c")
    use(monkeypatch)
    with pytest.raises(ValueError, match="choose one of: none"):
        load_calibrator("c")


def test_a_name_claimed_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ("mine", "one:A"), ("mine", "other:B"))
    with pytest.raises(
        BrokenPolicyError, match="2 installed packages claim the calibration 'mine'"
    ):
        load_calibrator("mine")


def test_a_broken_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ("mine", "no_such_module:A"), ("number", "kv_policy.calibrator:CALIBRATION"))
    with pytest.raises(
        BrokenPolicyError, match="'mine' of no_such_module cannot be loaded: Module"
    ):
        load_calibrator("mine")
    with pytest.raises(BrokenPolicyError, match="CALIBRATION is not callable"):
        load_calibrator("number")


def test_calibrators_of_heads_have_a_group_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        calibrator.HEAD_CALIBRATION: [
            EntryPoint("heads", "kv_policy.shape:CacheShape", calibrator.HEAD_CALIBRATION),
            EntryPoint("number", "kv_policy.calibrator:CALIBRATION", calibrator.HEAD_CALIBRATION),
        ]
    }
    monkeypatch.setattr(registry, "entry_points", lambda group: made.get(group, []))
    assert load_head_calibrator("heads").__name__ == "CacheShape"
    with pytest.raises(BrokenPolicyError, match=r"factory of a kv_policy\.HeadCalibrator"):
        load_head_calibrator("number")
    with pytest.raises(ValueError, match="unknown calibration 'heads'; choose one of: none"):
        load_calibrator("heads")


def test_calibrators_of_levels_have_a_group_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        calibrator.LEVEL_CALIBRATION: [
            EntryPoint("levels", "kv_policy.shape:CacheShape", calibrator.LEVEL_CALIBRATION),
            EntryPoint("number", "kv_policy.calibrator:CALIBRATION", calibrator.LEVEL_CALIBRATION),
        ]
    }
    monkeypatch.setattr(registry, "entry_points", lambda group: made.get(group, []))
    assert load_level_calibrator("levels").__name__ == "CacheShape"
    with pytest.raises(BrokenPolicyError, match=r"factory of a kv_policy\.LevelCalibrator"):
        load_level_calibrator("number")
    with pytest.raises(ValueError, match="unknown calibration 'levels'; choose one of: none"):
        load_calibrator("levels")
