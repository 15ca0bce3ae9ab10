"""Unsupported policies and configurations are rejected at engine start, with a message."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from kv_policy import (
    Basis,
    CacheShape,
    Capabilities,
    Formats,
    LayerBasis,
    Part,
    RawCodec,
    TokenFormat,
    parse,
)

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
SHAPE = CacheShape(1, 1, 1, 8, 8, torch.float32)


@dataclass(frozen=True)
class PairCodec(RawCodec):
    """Stores two tokens together."""

    @property
    def block(self) -> int:
        return 2


@dataclass(frozen=True)
class Strange(Part):
    """A codec with formats that this version does not support in vLLM."""

    name: ClassVar[str] = "strange"
    tiers: int = 1
    window: int = 0
    pairs: bool = False
    shares: bool = True

    @property
    def formats(self) -> Formats:
        return self

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(shares_prefixes=self.shares)

    def bind(self, shape: CacheShape) -> tuple[TokenFormat, ...]:
        codec = (PairCodec if self.pairs else RawCodec)(shape.key_dim, shape.dtype)
        return (TokenFormat(codec, codec),) * self.tiers


@dataclass(frozen=True)
class Turned(Part):
    """A basis."""

    name: ClassVar[str] = "turned"

    @property
    def basis(self) -> Basis:
        return self

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        return LayerBasis()


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., str]) -> str:
    return tiny()


@pytest.fixture
def start_tiny(start: Start) -> Start:
    small = {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 512}
    return partial(start, load_format="dummy", skip_tokenizer_init=True, **small)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (7, "kv_policy is 7; give a policy's text"),
        ("", "a policy's name is missing"),
        ("k9v9", "'k9v9'; the nearest of .*k8v4"),
        ("k8v4+k4v2", "k8v4 and k4v2 both define how tokens are stored"),
        ("kvzip:keep=25%+k8v4", "reads each prompt a second time, which vLLM does not do"),
    ],
)
def test_an_engine_does_not_start_with_a_policy_it_cannot_serve(
    llama: str, start_tiny: Start, policy: object, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason), start_tiny(llama, policy):
        pass


def test_bounds_of_heads_with_different_ranks_are_refused(
    weights: str, statistics: str, start: Start
) -> None:
    options = {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 256, "skip_tokenizer_init": True}
    with (
        pytest.raises(
            ValueError, match=r"stores heads with \d+ different ranks, for which this is"
        ),
        start(weights, f"zack:file={statistics},rate=0.4+k8v4+quest", **options),
    ):
        pass


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        (
            {"kv_polcy": "k8v4"},
            "has kv_polcy, which kv-serve does not know; did you mean kv_policy?",
        ),
        ({"KV-Policy": "k8v4"}, "has KV-Policy, which .* did you mean kv_policy?"),
        ({"kv_policy": "k8v4", "kv_poision": True}, "did you mean kv_poison?"),
        ({"kv_policy": "k8v4", "kv_poison": "no"}, "kv_poison is 'no'; give true or false"),
    ],
)
def test_settings_that_were_meant_for_kv_serve_are_refused(
    named: dict[str, object], reason: str
) -> None:
    from kv_serve.vllm.config import UnservableError, check_settings

    with pytest.raises(UnservableError, match=reason):
        check_settings(named)
    check_settings({"kv_policy": "k8v4", "kv_poison": True, "kv_transfer_params": 1, "mine": 2})


@pytest.mark.parametrize("named", [{"kv_policy": "k9v9"}, {"kv_polcy": "k8v4"}])
def test_a_configuration_is_checked_where_it_is_made(
    llama: str, named: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run engines in this process, as an engine in its own reports only that it failed to start."""
    from vllm import LLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match=r"k9v9|kv_polcy"):
        LLM(llama, load_format="dummy", skip_tokenizer_init=True, additional_config=named)


@pytest.mark.parametrize(
    "policy",
    [
        Turned(),
        Strange(tiers=2),
        Strange(window=64),
        Strange(pairs=True),
        Strange(shares=False),
        parse("snapkv+k8v4"),
        parse("leankv"),
    ],
    ids=str,
)
def test_what_is_stored_depends_on_more_than_the_token(policy: Part) -> None:
    from kv_serve.vllm.config import plain_format

    assert plain_format(policy, SHAPE) is None


@pytest.mark.parametrize("policy", [Strange(), parse("k8v4"), parse("raw")], ids=str)
def test_one_format_for_all_tokens(policy: Part) -> None:
    from kv_serve.vllm.config import plain_format

    assert (plain_format(policy, SHAPE),) == policy.formats.bind(SHAPE)


def test_a_prompt_of_the_longest_length_must_fit(llama: str, start_tiny: Start) -> None:
    from kv_serve.vllm.config import UnservableError

    # The keys and values of a token take 544 bytes under snapkv.
    few = {"kv_cache_memory_bytes": 450 * 544, "max_model_len": 480}
    with (
        pytest.raises(UnservableError, match=r"480 tokens takes 30 blocks .* but only 2\d exist;"),
        start_tiny(llama, "snapkv:budget=64", **few),
    ):
        pass


def test_a_model_of_windows_alone_is_refused(tiny: Callable[..., str], start_tiny: Start) -> None:
    from kv_serve.vllm.config import UnservableError

    with (
        pytest.raises(UnservableError, match="no layer of this model attends"),
        start_tiny(tiny("MistralForCausalLM", "mistral", sliding_window=64), "k8v4"),
    ):
        pass


def nas(*groups: int | None) -> Callable[[Any], Any]:
    """Change the query heads per KV head of each layer, or remove its attention."""

    def changed(config: Any) -> Any:
        config.num_hidden_layers = len(groups)
        config.block_configs = [
            SimpleNamespace(
                attention=SimpleNamespace(no_op=group is None, n_heads_in_group=group),
                ffn=SimpleNamespace(no_op=False, intermediate_size=128),
            )
            for group in groups
        ]
        return config

    return changed


def test_a_model_whose_layers_differ_is_not_served_in_pages(
    tiny: Callable[..., str], start_tiny: Start
) -> None:
    from kv_serve.vllm.config import UnservableError

    model = tiny("DeciLMForCausalLM", "llama")
    reason = "layer 1 of this model has 2 KV heads, and layer 0 has 4; this kv_policy needs"
    with (
        pytest.raises(UnservableError, match=reason),
        start_tiny(model, "snapkv:budget=64", hf_overrides=nas(1, 2)),
    ):
        pass


def test_layers_without_attention_need_no_pages(
    tiny: Callable[..., str], start_tiny: Start, greedy: Greedy, prompts: list[list[int]]
) -> None:
    model, found = tiny("DeciLMForCausalLM", "llama"), []
    for policy in (None, "streaming:budget=4096"):
        with start_tiny(model, policy, hf_overrides=nas(2, None, 2)) as engine:
            found.append(greedy(engine, prompts, 8))
    assert found[0] == found[1]


def test_two_say_how_keys_and_values_are_stored(llama: str, start_tiny: Start) -> None:
    from kv_serve.vllm.config import UnservableError

    with (
        pytest.raises(UnservableError, match="kv_cache_dtype is fp8 and kv_policy is given too"),
        start_tiny(llama, "k8v4", kv_cache_dtype="fp8"),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "NixlConnector",
                    "kv_role": "kv_both",
                }
            },
            "the KV connector NixlConnector",
        ),
    ],
)
def test_an_engine_that_would_share_or_move_pages(
    llama: str, options: dict[str, Any], what: str
) -> None:
    from vllm import EngineArgs

    from kv_serve.vllm.config import UnservableError, check_engine

    config = EngineArgs(model=llama, skip_tokenizer_init=True, **options).create_engine_config()
    with pytest.raises(UnservableError, match=f"the policy k8v4 cannot be served with {what}"):
        check_engine(config, parse("k8v4"))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_an_engine_that_cuts_sequences(llama: str, kind: str) -> None:
    from vllm import EngineArgs

    from kv_serve.vllm.config import UnservableError, check_engine

    config = EngineArgs(model=llama, skip_tokenizer_init=True).create_engine_config()
    setattr(config.parallel_config, f"{kind}_context_parallel_size", 2)
    with pytest.raises(UnservableError, match="cannot be served with context parallelism"):
        check_engine(config, parse("k8v4"))


@pytest.mark.parametrize(
    ("architecture", "kind", "more", "what"),
    [
        ("MambaForCausalLM", "mamba", {}, "a model without attention"),
        ("LlamaForCausalLM", "llama", {"v_head_dim": 16}, "keys and values of unlike dimensions"),
    ],
)
def test_a_model_that_vllm_serves_without_our_backend(
    tiny: Callable[..., str], architecture: str, kind: str, more: dict[str, Any], what: str
) -> None:
    from vllm import EngineArgs

    from kv_serve.vllm.config import UnservableError, check_engine

    model = tiny(architecture, kind, **more)
    config = EngineArgs(model=model, skip_tokenizer_init=True).create_engine_config()
    with pytest.raises(UnservableError, match=f"the policy k8v4 cannot be served with {what}"):
        check_engine(config, parse("k8v4"))


@pytest.mark.parametrize("version", ["0.28.1", "0.34.0", "1.0.0", "dev"])
def test_a_vllm_of_another_version(version: str) -> None:
    from kv_serve.vllm.config import UnservableError, check_version

    with pytest.raises(UnservableError, match=rf"0\.29 to 0\.33, but vLLM {version} is installed"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.29.0", "0.30.0", "0.31.1rc2", "0.33.0+cpu"])
def test_a_vllm_that_is_served(version: str) -> None:
    from kv_serve.vllm.config import check_version

    check_version(version)
