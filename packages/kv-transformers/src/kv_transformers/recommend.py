"""Which policy to use, by its bytes for a model and its cost where that was measured."""

from collections.abc import Mapping
from dataclasses import dataclass

from kv_policy import parse
from kv_transformers.capacity import Capacity, ModelMemory
from kv_transformers.from_text import FULL
from kv_transformers.measured import Figure, Found, Interval, Measured


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a policy.

    Attributes:
        context: tokens of a request.
        memory: bytes for the keys and values of all requests; None: not limited.
        requests: how many requests must fit into it at least.
        request_bytes: bytes of one request at most; None: not limited.
        loss: nats per token over the full cache's at most.
        later: whether questions come after the compressed prompt.
    """

    context: int
    memory: int | None = None
    requests: int = 1
    request_bytes: int | None = None
    loss: float = 0.02
    later: bool = False

    def fits(self, capacity: Capacity) -> bool:
        """Return whether the requests fit."""
        if self.request_bytes is not None and capacity.request_bytes > self.request_bytes:
            return False
        return self.memory is None or capacity.requests(self.memory) >= self.requests


def loses_nothing(interval: Interval, loss: float) -> bool:
    """Return whether an interval of paired differences shows no loss.

    It includes 0, or is below it, and its upper end is below the loss asked.
    """
    return interval[0] <= 0 and interval[1] < loss


def within(interval: Interval, loss: float) -> bool:
    """Return whether an interval of paired differences ends at no more than the loss asked."""
    return interval[1] <= loss


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy for a model.

    Attributes:
        policy: its canonical text form; `full` for the uncompressed cache.
        capacity: bytes of a request.
        figures: what was measured; empty for the uncompressed cache, which is what all others are
            compared with.
        selects: whether it keeps some tokens only, or stores some with fewer bits.
    """

    policy: str
    capacity: Capacity
    figures: tuple[Figure, ...] = ()
    selects: bool = False

    @property
    def upper(self) -> float:
        """The greatest upper end of an interval of its loss; 0 for the uncompressed cache."""
        return max((figure.interval[1] for figure in self.figures), default=0.0)

    @property
    def loss(self) -> float:
        """The greatest loss in a result; 0 for the uncompressed cache."""
        return max((figure.loss for figure in self.figures), default=0.0)

    def numbers(self, later: bool) -> tuple[Found, ...]:
        """Return the hidden numbers of one setting."""
        setting = "agnostic" if later else "aware"
        every = (found for figure in self.figures for found in figure.numbers)
        return tuple(found for found in every if found.setting == setting)

    def keeps(self, wish: Wish) -> bool:
        """Return whether the quality is what is asked for, in every result.

        The loss is, with its interval, at most the one asked. No interval shows that hidden numbers
        were lost; of a policy that selects tokens they were asked for.
        """
        numbers = self.numbers(wish.later)
        known = bool(numbers) or not self.selects
        kept = known and not any(found.lost for found in numbers)
        return kept and within((0.0, self.upper), wish.loss)


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer to a wish.

    Attributes:
        wish: what was asked.
        best: the policy with the fewest bytes that fits and whose quality is what is asked for;
            None: no measured policy is.
        nearest: of those that fit, the one that loses least; None: nothing fits.
        smallest: of those whose quality is what is asked for, the one with the fewest bytes.
        candidates: all that were considered, fewest bytes first.
    """

    wish: Wish
    best: Candidate | None
    nearest: Candidate | None
    smallest: Candidate
    candidates: tuple[Candidate, ...]


def choose(memory: ModelMemory, measured: Measured, wish: Wish) -> Choice:
    """Choose among the measured policies and the uncompressed cache.

    Policies that are not installed or do not support the model are left out.

    Args:
        memory: what the model's layers cache.
        measured: the figures.
        wish: what is asked for.
    """
    found = [Candidate(FULL, memory.stock(wish.context))]
    for policy, capacity in capacities(memory, measured.policies, wish.context).items():
        selects = parse(policy).selector is not None
        found.append(Candidate(policy, capacity, measured.of(policy), selects))
    found.sort(key=_order)
    good = [each for each in found if each.keeps(wish)]
    fitting = [each for each in found if wish.fits(each.capacity)]
    return Choice(
        wish=wish,
        best=next((each for each in good if wish.fits(each.capacity)), None),
        nearest=min(fitting, key=lambda each: (each.upper, *_order(each)), default=None),
        smallest=good[0],  # the uncompressed cache loses nothing
        candidates=tuple(found),
    )


def capacities(
    memory: ModelMemory, policies: tuple[str, ...], context: int
) -> Mapping[str, Capacity]:
    """Return the bytes of a request under each policy that is installed and supports the model."""
    found = {}
    for policy in policies:
        try:
            found[policy] = memory.under(parse(policy), context)
        except ValueError:
            continue
    return found


def _order(candidate: Candidate) -> tuple[int, float, str]:
    return candidate.capacity.request_bytes, candidate.upper, candidate.policy
