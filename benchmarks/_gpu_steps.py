"""What a decode step launches, and where the host waits for the device in it.

A case is `cache POLICY`, whose steps have attention and storage alone, or `model POLICY`, whose
steps are a small model's in transformers. Heads are those of Llama-3.1-8B, in 32 layers. In a
rehearsal nothing is counted.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

import torch
from _gpu_child import Report
from _gpu_tiles import chosen

POLICIES: Final = ("k8v4", "kv-compress:rate=4+k8v4", "leankv")
STOCK: Final = "stock"
CASES: Final = (
    *(f"cache {policy}" for policy in POLICIES),
    *(f"model {policy}" for policy in (*POLICIES, STOCK)),
)
LAYERS: Final = 32
HEADS, GROUP, DIM = 8, 4, 128
BATCH, PROMPT = 4, 512
WARM: Final = 4  # steps, in which everything is compiled
WATCHED: Final = 8  # steps in which waits are counted
TIMED: Final = 20
LAUNCH: Final = ("cudaLaunchKernel", "cuLaunchKernel", "hipLaunchKernel", "hipModuleLaunchKernel")
WAIT: Final = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
COPY: Final = ("cudaMemcpyAsync", "cudaMemcpy")
SHOWN: Final = 16
Step = Callable[[], object]


def counted(report: Report, case: str) -> None:
    """Count the launches and waits of steps, and time them."""
    host, _, policy = case.partition(" ")
    if host == "model":
        from importlib.util import find_spec

        if find_spec("transformers") is None:
            report.add("left out", case=case, why="transformers is not installed")
            return
    with torch.inference_mode(), chosen():
        step = (_cache if host == "cache" else _model)(report, policy)
        for _ in range(1 if report.quick else WARM):
            step()
        if report.device == "cpu":
            report.add("steps", case=case, host=host, policy=policy)
            return
        with report.trying(f"{case}, waits"):
            waits = _waits(step)
            report.add("waits", case=case, host=host, policy=policy, steps=WATCHED, waits=waits)
        with report.trying(f"{case}, launches"):
            report.add("steps", case=case, host=host, policy=policy, **_launches(step))
        with report.trying(f"{case}, time"):
            report.add("step time", case=case, host=host, policy=policy, **_timed(step))
        with report.trying(f"{case}, the first wait"):
            if sum(waits.values()):
                _first_wait(step)


@contextmanager
def watching(mode: str) -> Iterator[None]:
    """Let torch warn, or raise, where the host waits."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _waits(step: Step) -> dict[str, int]:
    """Count waits by the line that waits."""
    from _gpu_child import nameless

    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as said, watching("warn"):
        warnings.simplefilter("always")
        for _ in range(WATCHED):
            step()
    for each in said:
        if "synchroniz" in str(each.message):
            found[nameless(f'File "{each.filename}" line {each.lineno}')] += 1
    return dict(found.most_common(SHOWN))


def _first_wait(step: Step) -> None:
    """Raise where the host waits first; the cache is of no use after."""
    with watching("error"):
        for _ in range(WATCHED):
            step()


def _launches(step: Step) -> dict[str, object]:
    """Count what the driver was asked for in a step, and kernels by name."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    calls: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    busy = 0.0
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if not event.name.startswith(("Memcpy", "Memset")):
                kernels[event.name[:80]] += 1
            busy += event.time_range.elapsed_us()
        else:
            calls[event.name] += 1

    def of(names: tuple[str, ...]) -> int:
        return sum(count for name, count in calls.items() if name.startswith(names))

    return {
        "launches": of(LAUNCH),
        "kernels": sum(kernels.values()),
        "copies": of(COPY),
        "synchronized": of(WAIT) - 1,  # that of this function
        "busy_us": busy,
        "by_name": dict(kernels.most_common(SHOWN)),
    }


def _timed(step: Step) -> dict[str, object]:
    """Seconds until the host has issued a step, and until it is done."""
    torch.cuda.synchronize()
    began = perf_counter()
    for _ in range(TIMED):
        step()
    issued = perf_counter() - began
    torch.cuda.synchronize()
    return {"issued_ms": 1e3 * issued / TIMED, "ms": 1e3 * (perf_counter() - began) / TIMED}


def _cache(report: Report, policy: str) -> Step:
    """Steps of a cache without a model."""
    from kv_policy import CacheShape, parse
    from kv_runtime import PolicyCache

    layers, prompt, dim = (1, 20, 16) if report.quick else (LAYERS, PROMPT, DIM)
    dtype = torch.float32 if report.quick else torch.bfloat16
    shape = CacheShape(layers, HEADS, GROUP, dim, dim, dtype)
    cache = PolicyCache(parse(policy), shape, device=report.device, backend="triton")

    def vectors(count: int) -> list[torch.Tensor]:
        sizes = ((HEADS, GROUP, count, dim), (HEADS, count, dim), (HEADS, count, dim))
        return [torch.randn(BATCH, *x, device=report.device, dtype=dtype) for x in sizes]

    def run(valid: torch.Tensor, given: list[torch.Tensor], *, prompt: bool) -> None:
        cache.begin(valid, prompt=prompt)
        for layer in range(layers):
            cache.attend(layer, *given, dim**-0.5)

    every = torch.ones(BATCH, prompt, dtype=torch.bool, device=report.device)
    run(every, vectors(prompt), prompt=True)
    one, given = every[:, :1], vectors(1)
    return lambda: run(one, given, prompt=False)


def config(layers: int, *, quick: bool, hidden: int, inner: int, vocabulary: int) -> Any:
    """A Llama with the heads of the 8B model."""
    from transformers import LlamaConfig

    dim, heads = (16, 2) if quick else (DIM, HEADS)
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads * GROUP,
        num_key_value_heads=heads,
        head_dim=dim,
        max_position_embeddings=131_072,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def model_of(report: Report, of: Any) -> Any:
    """A model with random weights on the device."""
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if report.quick else torch.bfloat16
    with torch.device(report.device):
        model = AutoModelForCausalLM.from_config(of, dtype=dtype).eval()
    if model.dtype != dtype:
        raise RuntimeError(f"the model is in {model.dtype}, and was to be in {dtype}")
    return model


def cache_for(model: Any, policy: str) -> Any:
    """An empty cache of ours, or transformers' own."""
    if policy == STOCK:
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    from kv_transformers import CompressedCache

    return CompressedCache(model, policy, backend="triton")


def _model(report: Report, policy: str) -> Step:
    """Greedy steps of a model in transformers."""
    from kv_transformers import passing

    sizes = {"hidden": 32, "inner": 32} if report.quick else {"hidden": 512, "inner": 512}
    layers = 1 if report.quick else LAYERS
    model = model_of(report, config(layers, quick=report.quick, vocabulary=1000, **sizes))
    cache = cache_for(model, policy)
    prompt = 20 if report.quick else PROMPT
    token = torch.randint(0, 1000, (BATCH, prompt), device=report.device)
    held = [model(token, **passing(model, cache), use_cache=True).logits[:, -1:].argmax(-1)]

    def step() -> None:
        found = model(held[0], **passing(model, cache), use_cache=True)
        held[0] = found.logits[:, -1:].argmax(-1)

    return step
