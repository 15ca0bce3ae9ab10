"""What each method does to one text of 1,024 tokens on SmolLM2: what the figure of its page shows.

Rows of kind `kept` say where the tokens lie that a selector keeps after the prompt, or that `quest`
reads for the last query; of kind `basis` the singular values of heads and the dimensions they keep;
of kind `channels` which channels; and of kind `format` what codes of so many bits lose of the
text's own keys and values. `python -m tools.figures` draws them.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import _result
import torch
from _heads import head_scores
from _zack import statistics
from rich.console import Console
from torch import Tensor

from kv_attention import select_pages
from kv_eval.evaluate.shared import read_prompt
from kv_eval.tasks import default_text
from kv_policy import CacheShape, Codec, LayerBasis, parse, tier_formats
from kv_svd.file import load
from kv_svd.ranked import Ranked
from kv_transformers import CompressedCache, cache_shape, passing
from kv_transformers.collecting import CollectingCache, output_projections
from kv_transformers.models import LoadedModel, load_model

TOKENS = 1024
BIN = 16  # positions that are counted together
TOGETHER = 3  # SmolLM2's KV heads, for palu
ASKING = 64  # last queries, whose logits are compared
BUDGET = (
    "snapkv",
    "pyramidkv",
    "pyramidinfer",
    "zigzagkv",
    "prefixkv",
    "ada-snapkv",
    "ada-pyramidkv",
    "cake",
    "chunkkv",
    "kvcrush",
    "kv-compress",
    "kvzip",
    "expected-attention",
    "r-kv",
    "keydiff",
    "vnorm",
    "h2o",
    "d2o",
    "cam",
    "kvmerger",
    "keyformer",
    "scissorhands",
    "tova",
    "knorm",
    "streaming",
)
LAG = "lagkv:budget=256,lag=32"  # in chunks of 128, both ends alone would take 259
GATE = "gate:file=smollm2-135m,budget=256"
READING = "quest:budget=25%"
TWICE = ("kvzip:budget=256",)  # these read the text a second time, so each reads it alone
# FILE: the scores of heads. Windows are shorter than by default, for a text of 1,024 tokens.
ROLES = (
    "headkv:file=FILE,budget=256",
    "simlayerkv:recent=128",
    "razor:file=FILE,recent=128,part=0.0",
    "duo:file=FILE,sinks=16,recent=128",
)
SELECTORS = (
    *(f"{name}:budget=256" for name in BUDGET),
    LAG,
    GATE,
    *ROLES,
    "fastgen",
    "leankv",
    *TWICE,
)
BASES = ("zack", "svd-kv", "kq-svd", "palu")
CODECS = {
    "8 bits": "k8v8",
    "4 bits": "k4v4",
    "4 bits, group=32": "k4v4:group=32",
    "4 bits, channel": "k4v4:keys=channel",
    "4 bits, outlier": "k4v4:outliers=1",
    "4 bits, normal": "k4v4:levels=normal",
    "4 bits, bfp": "k4v4:levels=bfp,group=16",
    "3 bits": "k3v3",
    "3 bits, outlier": "k3v3:outliers=1",
    "3 bits, normal": "k3v3:levels=normal",
    "2 bits": "k2v2",
    "2 bits, group=32": "k2v2:group=32",
    "2 bits, channel": "k2v2:keys=channel",
    "1 bit": "k1v1",
}
CONSOLE = Console(stderr=True)

Row = dict[str, object]


@dataclass
class Seen:
    """A calibrator that keeps what it is shown, by layer."""

    query: list[Tensor] = field(default_factory=list)  # 1 H G L D
    key: list[Tensor] = field(default_factory=list)  # 1 H L D
    value: list[Tensor] = field(default_factory=list)

    def see(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, there: Tensor | None = None
    ) -> None:
        """Keep a layer's vectors, in float32."""
        self.query.append(query.float())
        self.key.append(key.float())
        self.value.append(value.float())


def prompt_of(loaded: LoadedModel, tokens: int) -> Tensor:
    """The beginning of the default text."""
    body = default_text().body[: tokens * 8]
    ids = loaded.tokenizer.encode(body, add_special_tokens=False)
    return torch.tensor([ids[:tokens]])


def selected(spec: str, cache: CompressedCache, length: int) -> Row:
    """Count the tokens of the first tier of a cache that has read a prompt, by place."""
    batch = cache.runtime.batch
    assert batch is not None
    shape = batch.shape
    there = torch.zeros(shape.layers, shape.kv_heads, length + 1, dtype=torch.bool)
    for tier, store in batch.held_stores:
        position = store.read_layers(slice(0, shape.layers)).position
        if tier == 0 and position is not None:
            by_head = position.long().view(shape.layers, shape.kv_heads, -1)
            there.scatter_(2, torch.where(by_head < 0, length, by_head), True)
    if batch.held_window is not None:
        raw = batch.held_window.position[0].long()
        there[..., torch.where(raw < 0, length, raw)] = True
    leankv = spec.startswith("leankv")
    counted = "tokens raw or in k8v4" if leankv else "tokens that stay"
    return placed(spec, counted, there[..., :length])


def read(spec: str, cache: CompressedCache, queries: Sequence[Tensor]) -> Row:
    """Count the tokens in the pages that a query of each layer reads, by place."""
    batch, reading = cache.runtime.batch, cache.policy.reading
    assert batch is not None
    assert reading is not None
    found = []
    for layer, query in enumerate(queries):
        ((pages, *_), _), bounds = batch.views(layer), batch.page_bounds(layer)
        assert bounds is not None
        whole = layer < reading.whole_layers
        some = pages if whole else select_pages(query, pages, bounds, reading)
        size = pages.layout.tokens
        every, mine = (x.table[0, :, : int(x.length.max()) // size] for x in (pages, some))
        there = (every[..., None] == mine[:, None]).any(-1)
        found.append(there.repeat_interleave(size, -1))
    return placed(spec, "tokens that the last query reads", torch.stack(found))


def placed(spec: str, counted: str, there: Tensor) -> Row:
    """Return the row of the tokens that are marked, by layer, KV head and position."""
    length = there.shape[-1]
    binned = there.unflatten(2, (-1, BIN)).sum((1, 3))
    return {
        "kind": "kept",
        "method": spec.partition(":")[0],
        "policy": spec.replace("file=FILE,", ""),
        "counted": counted,
        "tokens": length,
        "bin": BIN,
        "kept": [_text(layer) for layer in binned],
        "heads": [_text(layer) for layer in there.sum(2)],
        "mean": float(there.sum(2).double().mean()),
    }


def based(name: str, spec: str, file: Path, seen: Seen, weights: Sequence[Tensor]) -> Row:
    """Look up what a basis keeps, and how far logits and outputs are off with it."""
    policy = parse(spec.replace("FILE", str(file)))
    assert isinstance(policy, Ranked)
    spectra = policy.spectra(load(file)[1])
    ranks = policy.allotment
    return {
        "kind": "basis",
        "method": name,
        "policy": spec.replace("file=FILE,", ""),
        "dims": spectra[0].shape[-1],
        "key": _spread(spectra[0]),
        "value": _spread(spectra[1]),
        "key_ranks": [_text(layer) for layer in ranks.key],
        "value_ranks": [_text(layer) for layer in ranks.value],
        **off(policy.bind, seen, weights),
    }


def pruned(spec: str, file: Path, seen: Seen, weights: Sequence[Tensor], shape: CacheShape) -> Row:
    """Count the heads of a layer that keep a channel of keys."""
    policy = parse(spec.replace("FILE", str(file)))
    assert policy.basis is not None
    counts = []
    for layer in range(shape.layers):
        key = policy.basis.bind(layer, shape).key
        assert key is not None
        counts.append(_text(key.matrix.sum((0, 2))))
    return {
        "kind": "channels",
        "method": "think",
        "policy": spec.replace("file=FILE,", ""),
        "heads": shape.kv_heads,
        "key": counts,
        **off(policy.basis.bind, seen, weights),
    }


def off(
    bind: Callable[[int, CacheShape], LayerBasis], seen: Seen, weights: Sequence[Tensor]
) -> Row:
    """Give the relative error of logits, and of what heads give to the output; means of layers."""
    heads, _, dim = seen.key[0].shape[1:]
    group = seen.query[0].shape[2]
    shape = CacheShape(len(seen.key), heads, group, dim, seen.value[0].shape[-1], torch.float32)
    logits, outputs = [], []
    for layer, (query, key, value) in enumerate(zip(seen.query, seen.key, seen.value, strict=True)):
        found = bind(layer, shape)
        asking = query[..., -ASKING:, :]
        exact = (asking @ key[:, :, None].mT).flatten(1, 2)
        if found.key is not None:
            coordinates = found.key.project(key)[:, :, None]
            mapped = found.key.project_queries(asking) @ coordinates.mT
            logits.append(_relative(mapped.flatten(1, 2), exact))
        back = value
        if found.value is not None:
            stored = found.value.project(value)[:, :, None]
            together = found.value.together
            back = found.value.undo(stored.expand(-1, -1, together, -1, -1))[:, :, 0]
        slices = weights[layer].float().unflatten(1, (heads, group, -1))  # hidden H G D
        both = (torch.einsum("bhld,ohgd->bhglo", x, slices) for x in (back, value))
        outputs.append(_relative(*both))
    return {
        "logits_error": sum(logits) / len(logits),
        "outputs_error": sum(outputs) / len(outputs),
    }


def coded(label: str, spec: str, seen: Seen) -> Row:
    """Encode the text's keys and values, and say what they are off by; mean over heads."""
    key, value = (torch.cat(each).flatten(0, 1) for each in (seen.key, seen.value))
    shape = CacheShape(1, len(key), 1, key.shape[-1], value.shape[-1], torch.bfloat16)
    (form,) = tier_formats(parse(spec), shape)
    per_channel = form.block > 1
    return {
        "kind": "format",
        "codec": label,
        "policy": spec,
        "bytes": sum(form.key.parts) / form.block,
        "key_error": _lost(form.key, key),
        "value_error": None if per_channel else _lost(form.value, value),
    }


def _lost(codec: Codec, x: Tensor) -> float:
    """Relative error of the vectors of each head, as a mean over heads."""
    back = codec.decode(codec.encode(x.reshape(-1, codec.block, codec.dim))).float()
    difference = (back.reshape(x.shape) - x).norm(dim=(1, 2)) / x.norm(dim=(1, 2))
    return float(difference.double().mean())


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def _spread(singular: Tensor) -> dict[str, str]:
    """The middle of all heads' spectra, over each head's greatest, and where 80 % of them lie."""
    relative = (singular / singular[..., :1]).flatten(0, 1)
    shares = {"low": 0.1, "median": 0.5, "high": 0.9}
    return {
        name: " ".join(f"{x:.4f}" for x in relative.quantile(share, 0).tolist())
        for name, share in shares.items()
    }


def _text(row: Tensor) -> str:
    return " ".join(str(int(x)) for x in row.tolist())


def everything(loaded: LoadedModel, tokens: int, folder: Path) -> Iterator[Row]:
    """Run all methods, one after the other."""
    prompt = prompt_of(loaded, tokens)
    heads = folder / "heads.safetensors"
    head_scores(loaded, heads)

    def cache(spec: str) -> CompressedCache:
        text = spec.replace("FILE", str(heads))
        return CompressedCache(loaded.model, text, tokenizer=loaded.tokenizer)

    caches = {spec: cache(spec) for spec in SELECTORS}
    read_prompt(loaded.model, [*caches.values()], prompt)  # one attention for most of them
    yield from (selected(spec, cache, tokens) for spec, cache in caches.items())
    file = folder / "found.safetensors"
    for done in statistics(loaded, default_text(), 4 * tokens, file, TOGETHER):
        CONSOLE.print(f"{done:,} tokens read for bases")
    seen, shape = Seen(), cache_shape(loaded.model)
    with torch.no_grad():
        collecting = CollectingCache(loaded.model, seen)
        loaded.model.base_model(
            input_ids=prompt, **passing(loaded.model.base_model, collecting), use_cache=True
        )
        weights = list(output_projections(loaded.model, shape))
        pages = CompressedCache(loaded.model, READING)
        read_prompt(loaded.model, [pages], prompt)
        # A step, in which pages get their bounds.
        loaded.model(prompt[:, -1:], **passing(loaded.model, pages), use_cache=True)
        yield read(READING, pages, [query[..., -1, :] for query in seen.query])
        for name in BASES:
            more = f",together={TOGETHER}" if name == "palu" else ""
            yield based(name, f"{name}:file=FILE,rate=0.25{more}", file, seen, weights)
        yield pruned("think:file=FILE,rate=0.4", file, seen, weights, shape)
        for label, spec in CODECS.items():
            yield coded(label, spec, seen)


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that a document may quote."""
    found: dict[str, float] = {}
    for row in rows:
        if row["kind"] == "kept" and "budget" not in str(row["policy"]):  # the others keep theirs
            found[f"tokens_{_name(row['method'])}"] = float(str(row["mean"]))
    for row in rows:
        if row["kind"] in ("basis", "channels"):
            for what in ("logits", "outputs") if row["kind"] == "basis" else ("logits",):
                found[f"{what}_{_name(row['method'])}"] = float(str(row[f"{what}_error"]))
    for row in rows:
        if row["kind"] == "format":
            name = _name(row["codec"])
            found[f"keys_{name}"] = float(str(row["key_error"]))
            if row["value_error"] is not None:
                found[f"values_{name}"] = float(str(row["value_error"]))
    return found


def _name(value: object) -> str:
    words = str(value).replace("group=", "groups of ").replace(",", "")
    return words.replace(" ", "_").replace("-", "_")


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    loaded = load_model(progress=CONSOLE.print)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(everything(loaded, 320 if quick else TOKENS, Path(folder)))
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:32} {value:.4f}")
    _result.write("method_figures", summary, rows, quick=quick)


if __name__ == "__main__":
    main()
