"""Statistics sent from workers to Prometheus through vLLM's classes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kv_serve.vllm.versions import installed, minor
from measured import SOME

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

POLICY = "kv-compress:rate=2+k8v4"
IDLE = replace(SOME, pages_used=0, pages_free=10, held_bytes=0, full_bytes=0, kept=0, computed=0)
IDLE = replace(IDLE, prefix_bytes=0)


@pytest.fixture
def _no_metrics() -> Iterator[None]:
    """Clear vLLM's metrics from the registry, as vLLM does before it creates them."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def configured(policy: str = POLICY) -> Any:
    """Return the data that the metrics process receives."""
    from vllm.config import VllmConfig

    from kv_serve.vllm.attach import connector

    return VllmConfig(additional_config={"kv_policy": policy}, kv_transfer_config=connector())


def sample(name: str, engine: str = "0", policy: str = POLICY) -> float | None:
    from prometheus_client import REGISTRY

    labels = {"model_name": "mine", "engine": engine, "policy": policy}
    return REGISTRY.get_sample_value(f"vllm:kv_serve_{name}", labels)


def sent_of(stats: "KVConnectorStats") -> dict[str, Any]:
    """Return what vLLM sends of statistics, for which 0.29 has no method."""
    older = minor(installed() or "") == (0, 29)
    sent: dict[str, Any] = stats.data if older else stats.to_dict()
    return sent


def test_stats_join_over_time_and_are_read_by_people() -> None:
    from kv_serve.vllm.connector import PagesConnector
    from kv_serve.vllm.metrics import PolicyStats

    sent = sent_of(PolicyStats.of(SOME))
    assert all(isinstance(each, int | float) for each in sent.values())
    stats = PagesConnector.build_kv_connector_stats(sent)
    assert isinstance(stats, PolicyStats)
    assert not stats.is_empty()
    joined = stats.aggregate(PolicyStats.of(IDLE))
    assert joined.reduce() == {
        "tokens_computed": 0,
        "tokens_kept": 0,
        "pages_used": 0,
        "pages_free": 10,
        "prefix_bytes": 0,
        "kv_bytes_per_token": 15,  # of when memory was last held
        "compression_ratio": 4,
        "compression_passes": 2,
        "compression_seconds": 1,
        "tokens_dropped": 12,
        "bytes_saved": 1800,
        "prefix_hits": 6,
        "prefix_tokens": 180,
    }
    nothing = PagesConnector.build_kv_connector_stats()
    assert nothing is not None
    assert nothing.is_empty()
    assert sent_of(nothing.aggregate(stats)) == sent_of(stats.aggregate(nothing)) == sent
    stats.reset()
    assert stats.is_empty()


def test_reports_of_workers_join_with_what_was_measured() -> None:
    from kv_serve.vllm.messages import WorkerReport

    both = WorkerReport(1, measured=SOME).aggregate(WorkerReport(1, measured=SOME)).measured
    assert both == SOME.beside(SOME)
    assert WorkerReport(1).aggregate(WorkerReport(1, measured=SOME)).measured == SOME
    assert WorkerReport(1, measured=SOME).aggregate(WorkerReport(1)).measured == SOME
    assert WorkerReport(1).aggregate(WorkerReport(1)).measured is None


@pytest.mark.usefixtures("_no_metrics")
def test_prometheus_is_told_by_vllms_own_way() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    engines: dict[int, list[object]] = {0: ["mine", "0"], 1: ["mine", "1"]}
    told = KVConnectorProm(configured(), ["model_name", "engine"], engines)
    told.observe(asdict(SOME), 1)
    told.observe(asdict(IDLE), 1)
    assert sample("kv_bytes_per_token", "1") == 15  # of the last held pages
    assert sample("compression_ratio", "1") == 4
    assert sample("tokens_kept", "1") == sample("tokens_computed", "1") == 0
    assert sample("pages_used", "1") == 0
    assert sample("pages_free", "1") == 10
    assert sample("compression_passes_total", "1") == 2
    assert sample("compression_seconds_total", "1") == 1
    assert sample("tokens_dropped_total", "1") == 12
    assert sample("bytes_saved_total", "1") == 1800
    assert sample("prefix_bytes", "1") == 0
    assert sample("prefix_hits_total", "1") == 6
    assert sample("prefix_tokens_total", "1") == 180
    assert sample("compression_passes_total", "0") == 0


def test_vllms_log_is_told_by_vllms_own_way() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    lines: list[str] = []
    log = KVConnectorLogging(configured().kv_transfer_config)
    log.observe(asdict(SOME))
    log.observe(asdict(SOME))
    log.log(lambda form, said: lines.append(form % said))
    assert len(lines) == 1
    assert "compression_ratio=4.0, compression_passes=2" in lines[0]


@pytest.mark.usefixtures("_no_metrics")
@pytest.mark.parametrize("policy", [None, POLICY])
def test_only_plain_formats_are_announced(policy: str | None) -> None:
    from prometheus_client import REGISTRY

    from kv_serve.vllm import plain

    given = whole()
    given.additional_config = {} if policy is None else {"kv_policy": policy}
    plain.announce(given, [0])
    assert not [each.name for each in REGISTRY.collect() if "kv_serve" in each.name]


@pytest.mark.usefixtures("_no_metrics")
def test_a_plain_format_is_announced_for_every_engine_over_all_devices() -> None:
    from kv_serve.vllm import plain

    plain.announce(whole(), [0, 1])
    for engine in "01":
        assert sample("kv_bytes_per_token", engine, "k8v4") == 3 * 4 * 104
        assert sample("compression_ratio", engine, "k8v4") == pytest.approx(256 / 104)


def whole() -> Any:
    """Return a shape of three layers and four KV heads, two on each of two devices."""
    import torch

    model = SimpleNamespace(
        served_model_name="mine",
        dtype=torch.bfloat16,
        hf_text_config=SimpleNamespace(),
        get_num_layers_by_block_type=lambda parallel: 3,
        get_num_kv_heads=lambda parallel: 2,
        get_num_attention_heads=lambda parallel: 4,
        get_head_size=lambda: 64,
        use_mla=False,
    )
    return SimpleNamespace(
        additional_config={"kv_policy": "k8v4"},
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        model_config=model,
    )


def test_bytes_per_token_are_those_of_layers_of_full_attention() -> None:
    from kv_serve.vllm.plain import whole_shape

    config = whole()
    config.model_config.hf_text_config.layer_types = ["sliding_attention", "full_attention"] * 2
    assert whole_shape(config).layers == 2


def test_a_connector_that_only_the_engine_knows_of_sends_nothing(
    tiny: Callable[..., str], start: Callable[..., AbstractContextManager["LLM"]]
) -> None:
    from vllm import SamplingParams

    from kv_serve.vllm.attach import connector

    small: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    small |= {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 256, "disable_log_stats": False}
    settings = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    told = []
    model = tiny()
    for asked in (None, connector()):
        with start(model, POLICY, kv_transfer_config=asked, **small) as engine:
            engine.generate({"prompt_token_ids": list(range(64))}, settings, use_tqdm=False)
            told.append({each.name: each for each in engine.get_metrics()})
    names = [sorted(name for name in each if "kv_serve" in name) for each in told]
    assert names[0] == []
    assert len(names[1]) == 13


def test_a_connector_is_refused_where_nothing_is_counted(
    tiny: Callable[..., str], start: Callable[..., AbstractContextManager["LLM"]]
) -> None:
    from kv_serve.vllm.attach import connector

    small: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    small |= {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 256}
    with (
        pytest.raises(ValueError, match="k8v4 is stored in vLLM's slots and needs no KV"),
        start(tiny(), "k8v4", kv_transfer_config=connector(), **small),
    ):
        pass
