"""What `kv-serve recommend --measure` prints: the verdict, and the frontier as a table."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kv_transformers.cli.capacity import size
from kv_transformers.cli.console import out
from kv_transformers.cli.recommended import (
    answers,
    asked,
    commands,
    cost,
    line,
    recommended,
    verdict,
)

if TYPE_CHECKING:
    from kv_eval.evaluate.journal import Journal
    from kv_eval.recommend.halving import Standing
    from kv_eval.recommend.search import TextSearch
    from kv_transformers.capacity import Capacity
    from kv_transformers.recommend import Wish
    from kv_transformers.search import SearchOptions

MARK: Final = "*"  # beside the policy that is chosen


def show(
    made: "TextSearch",
    journal: "Journal",
    options: "SearchOptions",
    fit: "Mapping[str, Capacity]",
) -> bool:
    """Print the result of a search; return whether there is a policy to recommend.

    Args:
        made: the search, which has ended.
        journal: its samples.
        options: of the command.
        fit: the bytes of the policies that fit.
    """
    from kv_transformers.capacity import ModelMemory

    wish = options.wish
    stock = ModelMemory.of(made.loaded.model).stock(wish.context)
    finalists = made.halving.finalists(journal)
    best = next((each for each in finalists if made.good(each.arm.policy, journal)), None)
    good = best is not None
    best = finalists[0] if best is None else best
    assert best.interval is not None
    chosen = best.arm.policy
    line(f"Asked: {asked(wish)}.")
    if good:
        recommended(chosen, fit[chosen], stock, wish)
    else:
        line(
            f"No recommendation: of {_count(len(made.halving.arms), 'policy', 'policies')} that "
            f"fit, none is shown to lose no more than is asked. The nearest is {chosen}."
        )
    where = _count(best.windows, "window", "windows")
    line(f"Costs:  {cost(best.loss, best.interval)}, in {where} of {made.length:,} tokens")
    line(f"        {verdict(best.interval, wish.loss)}")
    line(f"        {_divergence(journal, best)}")
    for found in made.found(chosen, journal):
        line(f"        {answers(found)}")
    if good:
        commands(chosen, wish, options.model)
    _table(made, journal, fit, chosen)
    line(
        f"{_count(made.halving.spent, 'window', 'windows')} read in all, of "
        f"{len(made.halving.arms) * made.halving.windows:,} that all policies would have read."
    )
    return good


def smallest(every: "Mapping[str, Capacity]", tried: int, wish: "Wish") -> str:
    """Say that no policy fits, and which is nearest."""
    if not every:
        return f"none of {_count(tried, 'policy', 'policies')} supports the model"
    spec, least = min(every.items(), key=lambda each: each[1].request_bytes)
    return (
        f"no policy fits {asked(wish)}; the smallest of {len(every):,} is {spec}, with "
        f"{size(least.request_bytes)} for a request and {size(least.least_bytes)} during its "
        "prefill; use a shorter --context or more memory"
    )


def _divergence(journal: "Journal", best: "Standing") -> str:
    """Write the divergence of the chosen policy, over all tokens."""
    from kv_eval.evaluate.divergence import tail
    from kv_eval.recommend.halving import SETTING, TASK

    entries = (journal.get(best.arm.policy, TASK, SETTING, i) for i in range(best.windows))
    values = [value for entry in entries if entry is not None for value in entry.divergences]
    return (
        f"Next-token distributions diverge from the full cache's by {best.divergence:.4f} nats on "
        f"average, and one token in a thousand by more than {tail(values):.4f}."
    )


def _table(
    made: "TextSearch", journal: "Journal", fit: "Mapping[str, Capacity]", chosen: str
) -> None:
    """Print the frontier among the policies that have read most, and the chosen one."""
    from rich.markup import escape
    from rich.table import Table

    from kv_eval.recommend.halving import frontier

    every = made.standings(journal)
    most = min(made.halving.read, max(each.windows for each in every))
    compared = [each for each in every if each.windows >= max(2, most // 3)]
    best = [each.arm.policy for each in frontier(compared)]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("policy")
    for head in ("bytes a token", "loss", "95 %", "KL", "windows"):
        table.add_column(head, justify="right")
    for each in sorted(compared, key=lambda s: (s.arm.request_bytes, s.loss)):
        spec = each.arm.policy
        if spec not in best and spec != chosen:
            continue
        interval = each.interval
        table.add_row(
            MARK if spec == chosen else "",
            escape(spec),
            f"{fit[spec].token_bytes:,.0f}",
            f"{each.loss:+.4f}",
            "" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}",
            f"{each.divergence:.4f}",
            f"{each.windows:,}",
        )
    out().print(table)


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
