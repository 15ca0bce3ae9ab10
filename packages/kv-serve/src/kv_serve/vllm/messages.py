"""What the scheduler tells workers with a step, and what they tell it after."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kv_policy import Budget
from kv_runtime import Measured


@dataclass(frozen=True, slots=True)
class Turn:
    """What a step does for one request."""

    request: str
    computed: int  # tokens before the step; 0 begins it, also after a preemption
    tokens: int  # of the step
    prompt: int  # tokens that are read before any is generated; after a preemption more than asked
    budget: Budget | None = None  # its own, instead of the policy's
    serial: int = 0  # of this time that it begins; no other request, or time, has it
    refused: str | None = None  # why it cannot be served, so that workers let it fail

    @property
    def reads(self) -> bool:
        """Whether the tokens are of the prompt."""
        return self.computed < self.prompt

    @property
    def more(self) -> bool:
        """Whether the prompt goes on in a later step."""
        return self.computed + self.tokens < self.prompt


@dataclass(frozen=True, slots=True)
class Orders(KVConnectorMetadata):
    """A step, for the workers."""

    step: int  # its number
    turns: dict[int, Turn]  # by the number of the request's first block
    gone: tuple[str, ...] = ()  # finished, cancelled or preempted requests
    short: bool = False  # blocks are short: compress what can be compressed


@dataclass(frozen=True, slots=True)
class Told:
    """A request's pages after a step."""

    pages: int
    computed: int  # tokens by then


@dataclass(frozen=True, slots=True)
class Reports(KVConnectorWorkerMetadata):
    """What workers tell of their requests."""

    step: int  # that they come after
    told: dict[str, Told] = field(default_factory=dict)
    answered: bool = False  # blocks were short, and what could be compressed has been
    measured: Measured | None = None  # in steps that count

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Reports":
        """Join what another worker tells of its own heads: each request needs what most take."""
        assert isinstance(other, Reports)
        joined = dict(self.told)
        for request, theirs in other.told.items():
            mine = joined.get(request)
            if mine is None or theirs.pages > mine.pages:
                joined[request] = theirs
        measured = self.measured or other.measured
        if self.measured is not None and other.measured is not None:
            measured = self.measured.beside(other.measured)
        return type(self)(self.step, joined, self.answered or other.answered, measured)
