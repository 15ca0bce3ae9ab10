"""Texts for tasks, settings and numbers."""

from typing import Final

from kv_eval.report.frontier import LOWER, Panel, Point

_SCORES: Final = {
    "needle": "right answers, share (higher is better)",
    "multikey": "right answers, share (higher is better)",
    "agreement": "tokens equal to the full cache's, share (higher is better)",
    "nll": "nats per token over full (lower is better)",
}
HELD: Final = "bytes held, % of the full cache"
TIMES: Final = "seconds, over those of full (lower is better)"


def score_axis(task: str) -> str:
    """Return the label of a task's quality axis, with the better direction."""
    return _SCORES.get(task, "score (higher is better)")


def title(panel: Panel) -> str:
    """Return the title of a panel."""
    return f"{panel.task}, {panel.setting}, {panel.length:,} tokens"


def name(point: Point, files: tuple[str, ...]) -> str:
    """Return a point's policy, with its file if there are several."""
    return f"{point.row.policy} ({files[point.source]})" if len(files) > 1 else point.row.policy


def told(point: Point, files: tuple[str, ...]) -> str:
    """Return a point's name, and its measurements in lines of their own."""
    row = point.row
    unit = " nats per token" if row.task in LOWER else ""
    samples = "1 sample" if row.samples == 1 else f"{row.samples:,} samples"
    far = () if row.divergence is None else (f"KL {row.divergence:.4f} nats from full",)
    times = () if point.times is None else (f"{point.times:.2f} of full's seconds",)
    lines = (
        name(point, files),
        f"score {row.score:.3f}{unit}, full {row.full_score:.3f}",
        *far,
        f"{point.share:.1%} of the full cache",
        f"{row.kv_bytes:,.0f} bytes",
        samples,
        *times,
    )
    return "\n".join(lines)
