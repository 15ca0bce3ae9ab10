"""The entry point's effects on vLLM, and what it leaves unchanged."""

import logging
from collections.abc import Iterator

import pytest


def test_registering_again_changes_nothing() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kv_serve.vllm.names import OVERRIDES
    from kv_serve.vllm.plugin import register

    for _ in range(2):
        register()
        assert {name: AttentionBackendEnum[name].get_path() for name in OVERRIDES} == OVERRIDES


def test_our_classes_are_the_stock_ones_but_for_the_choice_of_the_implementation() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kv_serve.vllm.names import OVERRIDES
    from kv_serve.vllm.plugin import register

    register()
    for name in OVERRIDES:
        ours = AttentionBackendEnum[name].get_class()
        *_, stock = ours.__bases__  # preceded by the marker of backends that support policies
        assert f"{stock.__module__}.{stock.__qualname__}" == AttentionBackendEnum[name].value
        assert [x for x in vars(ours) if not x.startswith("_")] == ["get_impl_cls"]
        assert ours.get_impl_cls() is stock.get_impl_cls()


def test_elsewhere_than_on_a_cpu_nothing_changes_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import platforms
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kv_serve.vllm.names import OVERRIDES
    from kv_serve.vllm.plugin import register

    class Elsewhere:
        device_name = "abacus"

        def is_cpu(self) -> bool:
            return False

        def is_cuda(self) -> bool:
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
        "kv-serve supports policies on CPUs and NVIDIA GPUs; on abacus a kv_policy in "
        "additional_config has no effect"
    ]


class Gpu:
    """A platform that claims to be CUDA."""

    def is_cuda(self) -> bool:
        return True


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """Return the backend registered as CUSTOM on a GPU."""
    from vllm import platforms
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kv_serve.vllm.names import OVERRIDES
    from kv_serve.vllm.plugin import register

    for name in OVERRIDES:
        AttentionBackendEnum[name].clear_override()
    with monkeypatch.context() as patch:
        patch.setattr(platforms, "current_platform", Gpu())
        register()
    try:
        assert not any(AttentionBackendEnum[name].is_overridden() for name in OVERRIDES)
        yield AttentionBackendEnum.CUSTOM.get_class()
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
        register()


def test_on_a_gpu_a_name_of_our_own_is_registered_and_nothing_else(custom: type) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert AttentionBackendEnum[custom.get_name()] is AttentionBackendEnum.CUSTOM


def test_on_a_gpu_our_backend_serves_policies_only(
    custom: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_serve.vllm import custom as module
    from kv_serve.vllm.config import UnservableError
    from kv_serve.vllm.reader import FullImpl
    from kv_serve.vllm.slots import SlotBuilder

    with pytest.raises(UnservableError, match="the attention backend CUSTOM is kv-serve's here"):
        custom.get_impl_cls()
    monkeypatch.setattr(module, "names_policy", lambda: True)
    assert (custom.get_impl_cls(), custom.get_builder_cls()) == (FullImpl, SlotBuilder)


def test_on_a_gpu_vllm_finds_our_backend_valid_for_plain_attention_alone(
    custom: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.platforms.interface import DeviceCapability

    from kv_serve.vllm import custom as module

    monkeypatch.setattr(module, "names_policy", lambda: True)
    plain = {
        **{"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16},
        **{"use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False},
        **{"use_per_head_quant_scales": False, "attn_type": "decoder"},
        "device_capability": DeviceCapability(9, 0),
    }
    assert custom.validate_configuration(**plain) == []
    for other in ({"use_mla": True}, {"has_sink": True}, {"kv_cache_dtype": "fp8"}):
        assert custom.validate_configuration(**(plain | other)) != []
