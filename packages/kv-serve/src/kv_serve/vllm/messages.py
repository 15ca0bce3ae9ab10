"""What the scheduler tells workers with a step, and what they tell it after."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kv_runtime import Measured, RequestStep


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):
    """A step, for the workers."""

    step: int  # its number
    requests: dict[int, RequestStep]  # by the number of the request's first block
    gone: tuple[str, ...] = ()  # finished, cancelled or preempted requests
    short: bool = False  # blocks are short: compress what can be compressed


@dataclass(frozen=True, slots=True)
class RequestPages:
    """A request's pages after a step."""

    pages: int
    computed: int  # tokens by then


@dataclass(frozen=True, slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What workers tell of their requests."""

    step: int  # that they come after
    told: dict[str, RequestPages] = field(default_factory=dict)
    answered: bool = False  # blocks were short, and what could be compressed has been
    measured: Measured | None = None  # in steps that count

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Join what another worker tells of its own heads: each request needs what most take."""
        assert isinstance(other, WorkerReport)
        joined = dict(self.told)
        for request, theirs in other.told.items():
            mine = joined.get(request)
            if mine is None or theirs.pages > mine.pages:
                joined[request] = theirs
        measured = self.measured or other.measured
        if self.measured is not None and other.measured is not None:
            measured = self.measured.beside(other.measured)
        return type(self)(self.step, joined, self.answered or other.answered, measured)
