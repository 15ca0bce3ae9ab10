"""What the bases of a model are like: spectra, how they differ between texts, and a picture."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Final

import _zack
from _evaluation import CONSOLE
from _zack_size import Size

from kv_eval.tasks import Text, default_text
from kv_policy.files import write_whole
from kv_svd import Moments, Statistics, Zack, load, rotation
from kv_transformers.models import LoadedModel

TOGETHER: Final = 3  # all KV heads of SmolLM2, for palu


def calibration(
    loaded: LoadedModel, text: Text, tokens: int, folder: Path, quick: bool
) -> tuple[Path, Statistics]:
    """Statistics of a text; those that an interrupted run left are not made again."""
    mark = ".quick" if quick else ""
    path = folder / f"zack_quality.{text.name}.{text.digest}.{tokens}{mark}.statistics"
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
        allotment = Zack(str(path), rate=rate, multiple=1).allotment
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
    made = BytesIO()
    figure.savefig(made, format=path.suffix[1:], metadata={"Date": None})
    write_whole(path, made.getvalue())
    pyplot.close(figure)
