"""ZACK on SmolLM2: spectra, how stable bases are, and quality against what is removed.

Bases come from docstrings of Python's standard library; prompts are cut from Python's help topics,
so no prompt was read in calibration. Further texts are compared with --text.

* `spectrum`: mean singular values of a layer's heads, each head's over its greatest; of queries and
  keys stacked, of values and the output projection, and of keys and values alone.
* `drift`: how much worse bases of one text serve another, at the ranks of a rate of 0.25; `mixed`
  the same for a basis of all texts but the one; `tokens` for one of fewer tokens of the same text.
* `rate`: nats per token of held-out windows read in one pass over the cache of a policy. Attention
  of the pass runs in the reduced space, so it loses what it would lose token by token.
  `rate_at_99` is the greatest rate found by halving that keeps the nats within 1 % of the full
  cache's.
* `policy`: tasks, as `kv-serve eval` gives them, with the bytes held after the prompt.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

import _result
import _zack
import msgspec
import torch
from _evaluation import CONSOLE, evaluated
from torch.nn.functional import cross_entropy

from kv_policy import parse
from kv_serve import CompressedCache
from kv_serve.calibrate.loss import loss
from kv_serve.evaluate.caches import make_cache
from kv_serve.evaluate.journal import Journal
from kv_serve.evaluate.plan import Plan
from kv_serve.evaluate.report import rows as report_rows
from kv_serve.evaluate.specs import FULL
from kv_serve.models import LoadedModel, load_model
from kv_serve.tasks import Text, default_text, read_text
from kv_svd.file import load
from kv_svd.fit import Moments, rotation
from kv_svd.statistics import Statistics

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

TOGETHER: Final = 3  # all KV heads of SmolLM2, for palu
FITTED: Final = ("zack", "svd-kv", "kq-svd", "palu", "think")
METHODS: Final = (
    "zack:multiple=1",
    "zack:multiple=1,ranks=uniform",
    "zack:multiple=8",
    "zack",
    "kq-svd:multiple=1",
)
ALONE: Final = (
    *(f"zack:rate={rate},multiple=8" for rate in (0.125, 0.25, 0.375, 0.5)),
    *(f"zack:rate={rate},multiple=8,ranks=uniform" for rate in (0.125, 0.25)),
)
RELATIVES: Final = (
    *(f"kq-svd:rate={rate},multiple=8" for rate in (0.125, 0.25)),
    "svd-kv:rate=0.125,multiple=8",
    "palu:rate=0.125,multiple=8,together=3",
    "think:rate=0.25",
)
QUANTIZED: Final = ("k8v4", "k4v4", "k4v2")
BOTH: Final = (
    "zack:rate=0.125,multiple=8+k8v8",
    "zack:rate=0.125,multiple=8+k8v4",
    "zack:rate=0.25,multiple=8+k8v4",
    "kq-svd:rate=0.125,multiple=8+k8v4",
    "zack:rate=0,multiple=8+k4v4",
    "zack:rate=0.125,multiple=8+leankv:window=16",
)
EVICTED: Final = (
    "kv-compress:rate=4",
    "kv-compress:rate=4+zack:rate=0.125,multiple=8",
)


@dataclass(frozen=True)
class Size:
    """How much is run."""

    tokens: int  # of calibration
    counts: tuple[int, ...]  # tokens of other calibrations, the last the one to compare with
    windows: int  # held out, of `length` tokens
    length: int
    halvings: int
    methods: tuple[str, ...]
    policies: tuple[str, ...]
    plans: dict[str, Plan]


def full_size() -> Size:
    """What the committed figures come from."""
    return Size(
        tokens=16384,
        counts=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
        windows=4,
        length=1024,
        halvings=6,
        methods=METHODS,
        policies=(FULL, *ALONE, *RELATIVES, *QUANTIZED, *BOTH, *EVICTED),
        plans={
            "needle": Plan((FULL,), ("needle",), ("aware",), length=2000, samples=6),
            "multikey": Plan((FULL,), ("multikey",), ("aware",), length=2000, samples=4),
            "nll": Plan(
                (FULL,), ("nll",), ("agnostic",), length=1024, samples=4, batch=4, continuation=64
            ),
        },
    )


def quick_size() -> Size:
    """A smoke run: the same steps on very little."""
    return Size(
        tokens=512,
        counts=(256, 512),
        windows=1,
        length=96,
        halvings=1,
        methods=METHODS[:1],
        policies=(FULL, "zack:rate=0.25,multiple=8", "zack:rate=0.25,multiple=8+k8v4"),
        plans={
            "needle": Plan((FULL,), ("needle",), ("aware",), length=300, samples=1),
            "multikey": Plan((FULL,), ("multikey",), ("aware",), length=300, samples=1),
            "nll": Plan(
                (FULL,), ("nll",), ("agnostic",), length=160, samples=1, batch=1, continuation=3
            ),
        },
    )


def placed(spec: str, file: Path) -> str:
    """A policy with the file its basis comes from."""
    parts = []
    for part in spec.split("+"):
        name, _, options = part.partition(":")
        path = str(file).replace("+", r"\+").replace(",", r"\,")
        given = f"file={path}," if name in FITTED else ""
        parts.append(f"{name}:{given}{options}".rstrip(",:"))
    return "+".join(parts)


def calibration(
    loaded: LoadedModel, text: Text, tokens: int, folder: Path, quick: bool
) -> tuple[Path, Statistics]:
    """Statistics of a text; those that an interrupted run left are not made again."""
    mark = ".quick" if quick else ""
    path = folder / f"zack_quality.{text.name}.{text.digest}.{tokens}{mark}.partial"
    if not path.exists():
        for done in _zack.statistics(loaded, text, tokens, path, TOGETHER):
            CONSOLE.print(f"{text.name}: {done:,} of {tokens:,} tokens")
    return path, load(path)[1]


def spectra(found: Statistics) -> list[dict[str, object]]:
    """Mean singular values by layer, of pairs and of keys and values alone."""
    kinds: dict[str, list[Moments]] = {
        **_zack.pairs(found),
        "K": [layer.keys for layer in found],
        "V": [layer.values for layer in found],
    }
    rows: list[dict[str, object]] = []
    for kind, layers in kinds.items():
        for layer, moments in enumerate(layers):
            values = rotation(moments).singular
            mean = (values / values[:, :1]).mean(0)
            rows.append(
                {
                    "kind": "spectrum",
                    "pair": kind,
                    "layer": layer,
                    "values": [round(x, 5) for x in mean.tolist()],
                    "greatest": [round(x, 3) for x in values[:, 0].tolist()],
                }
            )
    return rows


def stability(
    loaded: LoadedModel, size: Size, others: Sequence[Text], folder: Path, quick: bool
) -> list[dict[str, object]]:
    """How far bases drift between texts, and with the number of tokens."""
    text = _zack.docstrings()
    path, mine = calibration(loaded, text, size.tokens, folder, quick)
    rows: list[dict[str, object]] = []
    for rate in (0.25, 0.5):
        policy = parse(placed(f"zack:rate={rate},multiple=1", path))
        allotment = policy.allotment  # type: ignore[attr-defined]
        ranks = {"Q-K": allotment.key, "V-O": allotment.value}
        for other in (default_text(), *others):
            _, theirs = calibration(loaded, other, size.tokens, folder, quick)
            both = zip((mine, theirs), (theirs, mine), (text, other), (other, text), strict=True)
            for a, b, first, second in both:
                names = {"kind": "drift", "rate": rate, "basis": first.name, "text": second.name}
                found = _zack.drift(_zack.pairs(a), _zack.pairs(b), ranks)
                rows.append({**names, "tokens": size.tokens, **found})
        texts = (text, default_text(), *others)
        each = [calibration(loaded, t, size.tokens, folder, quick)[1] for t in texts]
        for i, other in enumerate(texts):
            rest = _zack.pairs(*each[:i], *each[i + 1 :])
            found = _zack.drift(rest, _zack.pairs(each[i]), ranks)
            names = {"kind": "mixed", "rate": rate, "basis": "all others", "text": other.name}
            rows.append({**names, "tokens": size.tokens * (len(texts) - 1), **found})
        _, most = calibration(loaded, text, size.counts[-1], folder, quick)
        for count in size.counts[:-1]:
            _, few = calibration(loaded, text, count, folder, quick)
            found = _zack.drift(_zack.pairs(few), _zack.pairs(most), ranks)
            names = {"kind": "tokens", "rate": rate, "tokens": count, "beside": size.counts[-1]}
            rows.append({**names, **found})
    return rows


def nats(loaded: LoadedModel, spec: str, size: Size) -> tuple[float, float, float]:
    """Nats per token of held-out windows under a policy, dimensions removed, bytes held."""
    model, ids = loaded.model, loaded.tokenizer.encode(default_text().body, verbose=False)
    stride = (len(ids) - size.length) // max(1, size.windows - 1)
    windows = torch.tensor([ids[i * stride :][: size.length] for i in range(size.windows)])
    cache = None if spec == FULL else CompressedCache(model, spec)
    with torch.inference_mode():
        out = model(windows, past_key_values=cache, use_cache=cache is not None)
    value = cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten())
    if cache is None:
        return float(value), 0.0, 1.0
    bases, report = cache.tiered.bases, cache.memory()
    assert bases is not None
    kept = sum(map(sum, (*bases.key_dims, *bases.value_dims)))
    shape = cache.tiered.shape
    whole = shape.layers * shape.kv_heads * (shape.key_dim + shape.value_dim)
    return float(value), 1 - kept / whole, report.ratio


def rates(loaded: LoadedModel, size: Size, path: Path) -> list[dict[str, object]]:
    """Nats at many rates, and the greatest rate that keeps them within 1 %."""
    full, _, _ = nats(loaded, FULL, size)
    rows: list[dict[str, object]] = [{"kind": "rate", "policy": FULL, "nats": full, "removed": 0.0}]
    for method in size.methods:
        low, high = 0.0, 0.5
        for i in range(size.halvings + 2):
            # The ends first: what a rotation alone costs, and a point far out for the curve.
            rate = (0.0, 0.25, (low + high) / 2)[min(i, 2)]
            name, _, options = method.partition(":")
            spec = f"{name}:rate={rate}" + (f",{options}" if options else "")
            value, removed, held = nats(loaded, placed(spec, path), size)
            good = value <= full * 1.01
            row = {"kind": "rate", "method": method, "policy": spec, "nats": value}
            rows.append({**row, "removed": removed, "bytes": held, "within": good})
            CONSOLE.print(f"{spec}: {value:.4f} nats, {removed:.3f} removed")
            low, high = (max(low, rate), high) if good else (low, min(high, rate))
    return rows


def greatest(rows: Sequence[dict[str, object]], method: str) -> float:
    """The greatest share that a method removed within 1 %; 0 if there is none."""
    mine = [row for row in rows if row.get("method") == method and row["within"]]
    return max((float(str(row["removed"])) for row in mine), default=0.0)


def judged(spec: str, parts: Sequence[tuple[Plan, Journal]]) -> dict[str, object]:
    """Sum a policy up over the tasks."""
    row: dict[str, object] = {"kind": "policy", "policy": spec}
    every = []
    for plan, journal in parts:
        for task, setting in plan.pairs:
            both = [
                [journal.get(s, task, setting, i) for i in range(plan.samples)]
                for s in (spec, FULL)
            ]
            mine, full = ([entry for entry in each if entry is not None] for each in both)
            held = fmean(entry.kv_bytes / entry.full_bytes for entry in mine)
            found = loss([a.score for a in mine], [b.score for b in full], task)
            row |= {task: fmean(a.score for a in mine), f"{task}_bytes": held}
            row |= {f"{task}_lost": found.mean, f"{task}_noise": found.noise}
            if task != "nll":
                every.append(held)
    return row | {"bytes": fmean(every)}


def answers_kept(rows: Sequence[dict[str, object]], ranks: str) -> float:
    """The greatest rate at which needle and multikey keep 99 % of the full cache's score."""
    table = {str(row["policy"]): row for row in rows if row["kind"] == "policy"}
    full, best = table[FULL], 0.0
    for spec, row in table.items():
        if (
            spec.startswith("zack")
            and "+" not in spec
            and ("uniform" in spec) == (ranks == "uniform")
        ):
            rate = float(spec.partition("rate=")[2].partition(",")[0])
            share = (float(str(row[t])) / float(str(full[t])) for t in ("needle", "multikey"))
            best = max(best, rate) if min(share) >= 0.99 else best
    return best


def summarize(rows: Sequence[dict[str, object]]) -> dict[str, float]:
    """The figures that a document may quote."""
    found = {
        "rate_at_99": greatest(rows, "zack"),
        "rate_at_99_uniform": greatest(rows, "zack:multiple=1,ranks=uniform"),
        "rate_at_99_multiple_1": greatest(rows, "zack:multiple=1"),
        "rate_at_99_multiple_8": greatest(rows, "zack:multiple=8"),
        "rate_at_99_kq_svd": greatest(rows, "kq-svd:multiple=1"),
        "answers_rate_at_99": answers_kept(rows, "adaptive"),
        "answers_rate_at_99_uniform": answers_kept(rows, "uniform"),
    }
    at = [row for row in rows if row.get("rate") == 0.25]
    for kind, name in (("drift", "subspace_drift"), ("mixed", "subspace_drift_mixed")):
        mine = [row for row in at if row["kind"] == kind]
        for pair, short in (("Q-K", "qk"), ("V-O", "vo")):
            found[f"{name}_{short}"] = max(float(str(row[f"{pair} excess"])) for row in mine)
    found["subspace_drift"] = max(found["subspace_drift_qk"], found["subspace_drift_vo"])
    fewer = [row for row in at if row["kind"] == "tokens"]
    near = next((row for row in fewer if row["tokens"] == 16384), fewer[-1])
    found["subspace_drift_same_text"] = max(
        float(str(near[f"{pair} excess"])) for pair in ("Q-K", "V-O")
    )
    return found


def draw(rows: Sequence[dict[str, object]], path: Path) -> None:
    """Draw the spectra of all layers, as Figures 5 and 10 of the paper do for the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(11, 2.8), sharey=True, layout="constrained")
    for ax, pair in zip(axes, ("Q-K", "V-O", "K", "V"), strict=True):
        mine = [row for row in rows if row["kind"] == "spectrum" and row["pair"] == pair]
        for row in mine:
            color = pyplot.get_cmap("viridis")(int(str(row["layer"])) / max(1, len(mine) - 1))
            ax.plot(row["values"], color=color, linewidth=0.8)
        ax.set(title=pair, xlabel="dimension", yscale="log", ylim=(1e-3, 1.1))
    axes[0].set_ylabel("singular value / greatest")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="texts to compare with")
    parser.add_argument("--plot", type=Path, help="draw the spectra into an SVG file")
    parser.add_argument(
        "--only",
        choices=("bases", "rates", "needle", "multikey", "nll"),
        help="run a part, which a later run goes on from",
    )
    arguments = parser.parse_args()
    quick, only = arguments.quick, arguments.only
    size = quick_size() if quick else full_size()
    loaded, folder = load_model(progress=CONSOLE.print), _result.RESULTS
    others = [read_text(path) for path in arguments.text]
    path, found = calibration(loaded, _zack.docstrings(), size.tokens, folder, quick)

    rows: list[dict[str, object]] = []
    for name in ("bases", "rates"):
        if only not in (None, name):
            continue
        store = folder / f"zack_quality.{name}{'.quick' if quick else ''}.rows.partial"
        if store.exists():
            rows += msgspec.json.decode(store.read_bytes())
            continue
        if name == "bases":
            mine = spectra(found) + stability(loaded, size, others, folder, quick)
        else:
            mine = rates(loaded, size, path)
        store.write_bytes(msgspec.json.encode(mine))
        rows += mine

    def make(model: "PreTrainedModel", spec: str) -> "Cache":
        return make_cache(model, spec if spec == FULL else placed(spec, path))

    parts = []
    for name, plan in size.plans.items():
        if only in (None, name):
            asked = replace(plan, policies=size.policies)
            label = f"zack_quality.{name}" + (".quick" if quick else "")
            # Caches of equal basis share a prompt's pass, so all are asked at once.
            count = len(size.policies)
            parts.append((asked, evaluated(loaded, asked, label, make, count)))
    if only:
        return
    rows += [judged(spec, parts) for spec in size.policies]
    for plan, journal in parts:
        rows += [{"kind": r.task, **msgspec.to_builtins(r)} for r in report_rows(plan, journal)]
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:28} {value:.4f}")
    _result.write("zack_quality", summary, rows, quick=quick)
    if arguments.plot:
        draw(rows, arguments.plot)
    for _, journal in parts:
        journal.remove()
    for left in folder.glob("zack_quality.*.quick*partial" if quick else "zack_quality.*.partial"):
        left.unlink()


if __name__ == "__main__":
    main()
