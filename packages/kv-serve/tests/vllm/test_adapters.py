"""The installed vLLM has the known interfaces; a modified one is rejected with its differences."""

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm import LLM


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    """Clear the cached differences, so that faked interfaces are checked again."""
    from kv_serve.vllm import adapters

    adapters.differences.cache_clear()
    yield
    adapters.differences.cache_clear()


def faked(patch: pytest.MonkeyPatch, name: str, code: str) -> None:
    """Replace a definition in a module of vLLM."""
    from kv_serve.vllm import adapters

    stock = adapters._module
    module = types.ModuleType(name)
    exec(code, vars(module))
    patch.setattr(adapters, "_module", lambda each: module if each == name else stock(each))


def test_the_vllm_that_is_installed_is_as_we_know_it() -> None:
    from kv_serve.vllm.adapters import check_vllm, differences
    from kv_serve.vllm.versions import installed

    assert differences(str(installed())) == ()
    check_vllm()


def test_it_is_not_as_we_know_another_one() -> None:
    from kv_serve.vllm.adapters import differences
    from kv_serve.vllm.versions import installed, minor

    found = differences("0.30.0" if (minor(str(installed())) or (0, 0)) > (0, 30) else "0.32.0")
    assert {each.partition(" takes ")[0] for each in found} >= {
        "AttentionBackend.get_supported_kernel_block_sizes",
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
    }


@pytest.mark.parametrize(
    ("module", "code", "what"),
    [
        (
            "vllm.v1.attention.backend",
            "class AttentionBackend:\n def customize_spec(cls, spec, layer): ...",
            "AttentionBackend.customize_spec takes (spec, layer), not (spec)",
        ),
        (
            "vllm.v1.attention.backend",
            "class AttentionBackend: ...",
            "vllm.v1.attention.backend has no AttentionBackend.customize_spec",
        ),
        (
            "vllm.v1.attention.backends.registry",
            "def register_backend(backend, class_path=None, *, owner): ...",
            "register_backend takes (backend, class_path, owner), not (backend, class_path)",
        ),
        (
            "vllm.v1.attention.backends.registry",
            "def register_backend(backend): ...",
            "register_backend takes (backend), not (backend, class_path)",
        ),
        (
            "vllm.v1.kv_cache_interface",
            "class FullAttentionSpec:\n def prefix_cacheable(self): ...",
            "FullAttentionSpec.prefix_cacheable is not a property",
        ),
    ],
)
def test_a_vllm_that_differs_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, module: str, code: str, what: str
) -> None:
    from kv_serve.vllm.adapters import check_vllm
    from kv_serve.vllm.config import UnservableError

    faked(monkeypatch, module, code)
    with pytest.raises(
        UnservableError, match=r"differs from the supported vLLM 0\.29 to 0\.33"
    ) as told:
        check_vllm()
    assert what in str(told.value)


def test_what_we_call_may_take_more_if_it_need_not_be_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kv_serve.vllm.adapters import check_vllm

    code = "def register_backend(backend, class_path=None, *, owner=None): ..."
    faked(monkeypatch, "vllm.v1.attention.backends.registry", code)
    check_vllm()


def test_an_engine_does_not_start_in_a_vllm_that_differs(
    monkeypatch: pytest.MonkeyPatch,
    tiny: Callable[..., str],
    start: Callable[..., AbstractContextManager["LLM"]],
) -> None:
    code = "class BlockPool:\n def get_new_blocks(self): ..."
    faked(monkeypatch, "vllm.v1.core.block_pool", code)
    small = {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 22}
    with (
        pytest.raises(ValueError, match=r"get_new_blocks takes \(\), not \(num_blocks\)"),
        start(tiny(), "k8v4", max_model_len=512, **small),
    ):
        pass
