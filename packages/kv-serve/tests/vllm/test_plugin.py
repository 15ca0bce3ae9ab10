"""What the entry point changes in vLLM, and what it leaves alone."""

import logging

import pytest


def test_registering_again_changes_nothing() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kv_serve.vllm.plugin import OVERRIDES, register

    for _ in range(2):
        register()
        assert {name: AttentionBackendEnum[name].get_path() for name in OVERRIDES} == OVERRIDES


def test_our_classes_are_the_stock_ones_but_for_the_choice_of_the_implementation() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kv_serve.vllm.plugin import OVERRIDES, register

    register()
    for name in OVERRIDES:
        ours = AttentionBackendEnum[name].get_class()
        (stock,) = ours.__bases__
        assert f"{stock.__module__}.{stock.__qualname__}" == AttentionBackendEnum[name].value
        assert [x for x in vars(ours) if not x.startswith("_")] == ["get_impl_cls"]
        assert ours.get_impl_cls() is stock.get_impl_cls()


def test_elsewhere_than_on_a_cpu_nothing_changes_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import platforms
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kv_serve.vllm.plugin import OVERRIDES, register

    class Elsewhere:
        device_name = "abacus"

        def is_cpu(self) -> bool:
            return False

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(platforms, "current_platform", Elsewhere())
    for name in OVERRIDES:
        AttentionBackendEnum[name].clear_override()
    logger = logging.getLogger("vllm.kv_serve")
    logger.addHandler(handler)
    try:
        register()
        assert not any(AttentionBackendEnum[name].is_overridden() for name in OVERRIDES)
    finally:
        logger.removeHandler(handler)
        monkeypatch.undo()
        register()
    assert told == [
        "kv-serve serves policies on a CPU; on abacus a kv_policy in additional_config changes "
        "nothing"
    ]
