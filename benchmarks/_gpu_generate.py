"""`generate` at the shapes of Llama-3.1-8B, under caches of transformers and of ours.

Weights are random, in bfloat16, and so are prompts. A card with less memory gets fewer layers, and
rows say how many. Milliseconds per token are the seconds of a long answer less those of one of a
token, over the tokens between.
"""

from time import perf_counter
from typing import Any, Final

import torch
from _gpu_child import Report, free
from _gpu_steps import STOCK, cache_for, config, model_of
from _gpu_tiles import chosen

STATIC: Final = "stock static"
CASES: Final = (STOCK, STATIC, "k8v4", "kv-compress:rate=4+k8v4", "leankv")
BATCHES: Final = (1, 8)
PROMPT, ANSWER = 4096, 24
LAYERS, HIDDEN, INNER, VOCABULARY = 32, 4096, 14_336, 32_000
LAYER_BYTES: Final = 440e6
CACHE_BYTES: Final = 20e9  # for caches, and what attention and `generate` need
_MODELS: dict[str, Any] = {}  # that of this process


def generated(report: Report, case: str) -> None:
    """Generate with a cache, for each batch."""
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        report.add("left out", case=case, why="transformers is not installed")
        return
    model = _MODELS.get("") or _MODELS.setdefault("", _loaded(report))
    for batch in BATCHES[:1] if report.quick else BATCHES:
        if report.left < 10 and not report.quick:
            report.add("left out", case=f"{case}, batch {batch}", why="no time is left")
            continue
        with report.trying(f"{case}, batch {batch}"), torch.inference_mode(), chosen():
            _measure(report, model, case, batch)
        free()


def _loaded(report: Report) -> Any:
    if report.quick:
        return model_of(report, config(1, quick=True, hidden=32, inner=32, vocabulary=1000))
    there = torch.cuda.mem_get_info()[0]
    layers = max(min(LAYERS, int((there - CACHE_BYTES) / LAYER_BYTES)), 2)
    sizes = {"hidden": HIDDEN, "inner": INNER, "vocabulary": VOCABULARY}
    return model_of(report, config(layers, quick=False, **sizes))


def _measure(report: Report, model: Any, case: str, batch: int) -> None:
    prompt, answer = (24, 3) if report.quick else (PROMPT, ANSWER)
    tokens = torch.randint(0, 1000, (batch, prompt), device=report.device)
    if not report.quick:
        once(model, case, tokens, answer)  # compiles
    times, peak, size, layers = {}, 0, 0, model.config.num_hidden_layers
    for count in (1, answer):
        if report.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = perf_counter()
        cache = once(model, case, tokens, count)
        if report.device != "cpu":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        times[count] = perf_counter() - began
        size = nbytes(cache)
        del cache
    report.add(
        "generate",
        way=case,
        batch=batch,
        prompt=prompt,
        layers=layers,
        ms_per_token=1e3 * (times[answer] - times[1]) / (answer - 1),
        first_ms=1e3 * times[1],
        peak_gib=peak / 2**30,
        cache_mib=size / 2**20,
    )


def once(model: Any, case: str, tokens: torch.Tensor, count: int) -> Any:
    """Generate exactly `count` tokens, and give the cache."""
    from transformers import StaticCache

    from kv_transformers import passing

    if case == STATIC:
        length = tokens.shape[1] + ANSWER + 1
        cache: Any = StaticCache(config=model.config, max_cache_len=length)
    else:
        cache = cache_for(model, case)
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
        disable_compile=True,
        **passing(model, cache),
    )
    return cache


def nbytes(cache: Any) -> int:
    """Bytes of keys and values, and of what else a cache holds of them."""
    from kv_transformers.from_text import held

    return held(cache).kv_bytes
