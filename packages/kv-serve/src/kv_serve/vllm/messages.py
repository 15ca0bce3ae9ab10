"""Messages between scheduler and workers: a step's metadata and the workers' reports."""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kv_runtime import Measured, RequestStep


class BlockChanges(NamedTuple):
    """Blocks that enter or leave a shared pool's part for pages, in the order of the fields."""

    left: tuple[int, ...] = ()  # when no request had pages; others may write to them already
    taken: tuple[int, ...] = ()  # pages may be in them from this step on
    leaving: tuple[int, ...] = ()  # pages must move out of them


class BlockCopies(NamedTuple):
    """Copies of blocks of layers that vLLM keeps, each from a block to another one."""

    before: tuple[tuple[int, int], ...] = ()  # a step's forward pass, from stored prefixes
    after: tuple[tuple[int, int], ...] = ()  # it, into prefixes that are stored


# A column of a group's block table, and the numbers of the blocks from there on.
Place = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):
    """The scheduler's message to the workers for one step."""

    step: int  # number of the step
    requests: dict[int, RequestStep]  # keyed by the number of the request's first block
    gone: tuple[str, ...] = ()  # finished, cancelled or preempted requests
    short: bool = False  # blocks are short: compress all requests that can be compressed
    changes: BlockChanges = field(default_factory=BlockChanges)  # of the blocks with pages
    kept: dict[str, int] = field(default_factory=dict)  # prefixes to store, by finished request
    dropped: tuple[int, ...] = ()  # prefixes to release
    reached: dict[str, int] = field(default_factory=dict)  # tokens of requests in `kept`
    copies: BlockCopies = field(default_factory=BlockCopies)
    loads: dict[int, tuple[Place, ...]] = field(default_factory=dict)  # documents, by number


@dataclass(frozen=True, slots=True)
class RequestPages:
    """A request's pages after a step."""

    pages: int
    computed: int  # tokens computed by the end of the step


@dataclass(frozen=True, slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """A worker's report on its requests after a step.

    The worker sends it at the end of the next step: its host does not wait for the forward pass of
    a step that it has just launched. Without a forward pass in that step, it is about that one too.
    """

    step: int  # number of the step
    told: dict[str, RequestPages] = field(default_factory=dict)
    answered: bool = False  # blocks were short and requests have been compressed
    measured: Measured | None = None  # None in steps without metrics
    begun: int = 0  # number of the step at whose end it is sent; pages have moved as this ordered
    prefixes: dict[int, int] = field(default_factory=dict)  # pages of those stored in the step

    def then(self, later: "WorkerReport") -> "WorkerReport":
        """Join the same worker's report on a later step."""
        measured = later.measured or self.measured
        if self.measured is not None and later.measured is not None:
            measured = self.measured.then(later.measured)
        told, answered = self.told | later.told, self.answered or later.answered
        prefixes = self.prefixes | later.prefixes
        return type(self)(later.step, told, answered, measured, later.begun, prefixes)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Join another worker's report on its heads: a request needs the larger number of pages.

        A prefix is stored if all workers store it.
        """
        assert isinstance(other, WorkerReport)
        joined = dict(self.told)
        for request, theirs in other.told.items():
            mine = joined.get(request)
            if mine is None or theirs.pages > mine.pages:
                joined[request] = theirs
        measured = self.measured or other.measured
        if self.measured is not None and other.measured is not None:
            measured = self.measured.beside(other.measured)
        answered, stored = self.answered or other.answered, other.prefixes
        prefixes = {n: max(pages, stored[n]) for n, pages in self.prefixes.items() if n in stored}
        return type(self)(self.step, joined, answered, measured, self.begun, prefixes)
