"""Choice of the sequences to plan: all that are due, up to the size of one plan."""

from collections.abc import Collection, Iterable, Sequence

from kv_policy import Replan
from kv_runtime.retain.plans import TurnCounts


class Turns:
    """Records, on the host, when each sequence of a batch was last planned and which are due.

    Sequences never planned are first, then those with the oldest plan; a plan ends before the first
    sequence that would exceed `most` tokens (KV-Compress, section 4.2.3).
    """

    def __init__(self, replan: Replan) -> None:
        """Start before the first pass."""
        self.replan = replan
        self._planned: list[int] = []  # the pass of the last plan, 0 before the first
        self._due: list[bool] = []
        self._steps: list[int] = []  # decode passes of each since it became due
        self._passes = 0
        self._tokens = 0  # tokens generated since all became due, over the batch
        self._vacant: set[int] = set()  # sequences of no request, which are never due

    @property
    def waiting(self) -> bool:
        """Whether any sequence is due."""
        return any(self._due)

    def prompt(self, sequences: int, rows: Sequence[int] | None = None) -> None:
        """Count a prefill pass of some sequences, all if None; they become due."""
        if not self._due:
            self._planned, self._steps = [0] * sequences, [0] * sequences
            self._due = [False] * sequences
        self._passes += 1
        self._let(range(sequences) if rows is None else rows)

    def step(self, sequences: int, rows: Sequence[int] | None = None) -> None:
        """Count a decode pass of some sequences, all if None."""
        self._passes += 1
        mine = [i for i in range(sequences) if i not in self._vacant] if rows is None else rows
        self._tokens += len(mine)
        for i in mine:
            self._steps[i] += 1
        often, much = self.replan.every, self.replan.uncompressed
        if much and self._tokens > much:
            self._let(range(sequences))
        elif often:
            self._let([i for i in mine if self._steps[i] >= often])

    def _let(self, rows: Iterable[int]) -> None:
        """Mark sequences as due."""
        for i in rows:
            if i not in self._vacant:
                self._due[i], self._steps[i] = True, 0
        if sum(self._due) == len(self._due) - len(self._vacant):
            self._tokens = 0

    def next(
        self,
        sizes: Sequence[int],
        *,
        among: Collection[int] | None = None,
        beside: Collection[int] | None = (),
    ) -> list[int]:
        """Return the due sequences of the next plan.

        Args:
            sizes: tokens of each sequence over layers and heads.
            among: candidate sequences, all if None.
            beside: excluded sequences.
        """
        may = range(len(self._due)) if among is None else among
        due = (i for i in may if self._due[i] and i not in (beside or ()))
        return self._within(self._oldest(due), sizes)

    def short(self, sizes: Sequence[int], gains: Sequence[int], wanted: int | None) -> list[int]:
        """Return sequences to plan because pages are short, due or not; none if nothing is freed.

        Args:
            sizes: tokens of each sequence over layers and heads.
            gains: tokens that a plan of each would evict.
            wanted: stop after this many evicted tokens; None: no limit.
        """
        enough: list[int] = []
        gained = 0
        for i in self._oldest(i for i, gain in enumerate(gains) if gain > 0):
            if wanted is not None and gained >= wanted:
                break
            gained += gains[i]
            enough.append(i)
        return self._within(enough, sizes)

    def _oldest(self, sequences: Iterable[int]) -> list[int]:
        """Sort by the last plan; sequences never planned are first."""
        return sorted(sequences, key=lambda i: self._planned[i])

    def _within(self, sequences: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Return the first sequences, up to the size of one plan."""
        most, total = self.replan.most, 0
        for count, i in enumerate(sequences):
            total += sizes[i]
            if count and most is not None and total > most:
                return sorted(sequences[:count])
        return sorted(sequences)

    def done(self, planned: Sequence[int]) -> None:
        """Record that these were planned."""
        for i in planned:
            self._due[i], self._planned[i] = False, self._passes

    def join(self, other: "Turns") -> None:
        """Append the sequences of another batch; a plan of theirs counts as just made.

        They become due by `every` together with the others, so that one plan covers all.
        """
        self._steps += [max(self._steps, default=0)] * len(other._steps)
        self._planned += [min(at, 1) * self._passes for at in other._planned]
        self._due += other._due

    def fix(self, sequences: int) -> None:
        """Begin with vacant sequences only."""
        self._planned, self._steps = [0] * sequences, [0] * sequences
        self._due, self._vacant = [False] * sequences, set(range(sequences))

    def adopt(self, sequence: int, other: "Turns") -> None:
        """Let the only sequence of another batch take the place of a vacant one, as `join`."""
        self._steps[sequence] = max(self._steps)
        self._planned[sequence] = min(other._planned[0], 1) * self._passes
        self._due[sequence] = other._due[0]
        self._vacant.discard(sequence)

    def clear(self, sequences: Iterable[int]) -> None:
        """Let sequences be vacant."""
        for i in sequences:
            self._planned[i], self._due[i], self._steps[i] = 0, False, 0
            self._vacant.add(i)

    def select(self, source: Sequence[int]) -> None:
        """Reorder sequences to source[0], source[1], ..."""
        self._planned = [self._planned[i] for i in source]
        self._due = [self._due[i] for i in source]
        self._steps = [self._steps[i] for i in source]

    def counts(self) -> TurnCounts:
        """Return the counts, for `restore`."""
        each = tuple(self._planned), tuple(self._due), tuple(self._steps)
        return TurnCounts(*each, passes=self._passes, tokens=self._tokens)

    def restore(self, counts: TurnCounts) -> None:
        """Continue from the counts of another batch."""
        self._planned, self._due = list(counts.planned), list(counts.due)
        self._steps, self._passes = list(counts.steps), counts.passes
        self._tokens = counts.tokens
