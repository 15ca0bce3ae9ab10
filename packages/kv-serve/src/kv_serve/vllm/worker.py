"""The worker's state: the pages of its requests, in memory allocated by vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Final

from jaxtyping import Int
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger

from kv_paging import PagePool, PoolExhausted, page_kernels_of
from kv_policy import KVPolicy
from kv_runtime import (
    DamagedStateError,
    HeldCopy,
    Meter,
    PolicyCache,
    PrefixPages,
    RequestBatch,
    RequestRows,
    Tally,
)
from kv_serve.vllm.attach import is_heard
from kv_serve.vllm.config import UnservableError
from kv_serve.vllm.documents import LoadedDocument, documents
from kv_serve.vllm.drafters import drafting_layers
from kv_serve.vllm.loaded_windows import LoadedWindows
from kv_serve.vllm.memory import Memory
from kv_serve.vllm.messages import Place, RequestPages, StepMetadata, WorkerReport
from kv_serve.vllm.names import POISON
from kv_serve.vllm.shape import attention_layers, backend_of, model_shape

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

logger = init_logger("vllm.kv_serve")
_MADE_UP: Final = (
    "vLLM ended a step whose tokens did not reach all layers under the policy, so its output is "
    "wrong; please report this with vLLM's version and options"
)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step that has ended for the host, and not yet for the device."""

    metadata: StepMetadata
    names: frozenset[str]  # requests to report
    held: HeldCopy
    serials: Mapping[str, int]  # of all requests
    read: bool  # whether a prefill finished
    replayed: bool  # whether a captured step was launched, as far as the host knows
    prefixes: PrefixPages  # of those stored in the step


@dataclass(slots=True)
class Worker:
    """The requests of a worker and its reports to the scheduler, a step late.

    vLLM runs whole steps in inference mode, so tensors kept across steps may be inference tensors.
    """

    requests: RequestBatch
    pool: PagePool
    memory: Memory
    meter: Meter | None = None  # None: metrics are not reported
    metadata: StepMetadata | None = None  # of the current step
    compressed: set[str] = field(default_factory=set)  # at the start of the step
    rows: RequestRows | None = None  # that vLLM built last, for the next step
    computed: bool = False  # the forward pass of the step has ended
    unreported: _Ended | None = None  # the step before
    prefix_pages: dict[int, int] = field(default_factory=dict)  # of stored prefixes, as reported
    windows: LoadedWindows = field(default_factory=lambda: LoadedWindows(()))
    documents: dict[int, LoadedDocument] = field(default_factory=dict)  # not loaded yet
    drafts: bool = False  # whether layers draft, after the forward pass of a step
    late: tuple[tuple[int, int], ...] = ()  # copies of blocks to which they write then

    @classmethod
    def over(
        cls,
        config: VllmConfig,
        policy: KVPolicy,
        memory: Memory,
        kept: "Sequence[KVCacheGroupSpec]" = (),
    ) -> "Worker":
        """Create a worker without requests over the memory of vLLM's blocks.

        Args:
            config: the engine's.
            policy: its policy.
            memory: the memory.
            kept: the groups of layers that vLLM keeps.

        Raises:
            UnservableError: documents cannot be loaded.
        """
        layer = attention_layers(config)[0]
        shape = model_shape(config, layer)
        backend = backend_of(config, policy, shape).backend
        poison = bool(config.additional_config.get(POISON))
        kernels = page_kernels_of(backend)
        pool = PagePool.over(memory.data, free=not memory.kept, poison=poison, kernels=kernels)
        meter = Meter(shape, Tally()) if is_heard(config) else None
        pages, device = memory.account.page_tokens, memory.data.device
        cache = partial(
            PolicyCache, policy, shape, page_tokens=pages, device=device, backend=backend
        )
        empty = cache(pool=pool, tally=None if meter is None else meter.tally, careful=True)
        requests = RequestBatch(empty, layer.impl.scale, _tell)
        windows, later = LoadedWindows.of(config, kept), {}
        for each in documents(config, policy):
            try:
                windows.expect(each.own, len(each.ids))
                if memory.kept:  # the pool has pages once the scheduler has taken blocks
                    cache().restore(each.state)
                    later[each.number] = each
                else:
                    requests.prefixes.load(each.number, empty, each.state)
            except DamagedStateError as error:
                raise each.damaged(error) from None
            except PoolExhausted as error:
                raise UnservableError(f"{each.path} is larger than the memory: {error}") from error
            except ValueError as error:
                raise UnservableError(f"{each.path} cannot be served: {error}") from error
        drafts = bool(drafting_layers(config))
        return cls(requests, pool, memory, meter, windows=windows, documents=later, drafts=drafts)

    def begin(self, metadata: StepMetadata) -> None:
        """Begin a step: free requests that ended, compress if blocks are short, and move pages.

        Drafts of the steps before that were right are stored first.

        If vLLM has built the step's rows, they are opened, since a graph may be launched next, in
        which no layer is called.
        """
        self.metadata, changes, self.computed = metadata, metadata.changes, False
        of_prefixes = metadata.kept, metadata.dropped, metadata.reached
        self.requests.begin(metadata.requests, metadata.gone, *of_prefixes)
        if changes.left:
            self._withdraw(self.memory.pages(changes.left))
        if changes.taken:
            self.pool.release(self.memory.pages(changes.taken))
        for number, places in metadata.loads.items():
            self._load(self.documents.pop(number), places)
        self.requests.confirm()  # only what is right is compressed
        self.compressed = self.requests.compress() if metadata.short else set()
        if changes.leaving:
            self._withdraw(self.memory.pages(changes.leaving))
        self.memory.copy(metadata.copies.before)
        rows, self.rows = self.rows, None
        if rows is not None and self.requests.are_of_step(rows):
            self.requests.open(rows)

    def _load(self, document: LoadedDocument, places: Sequence[Place]) -> None:
        """Load a document, with blocks of the layers that vLLM keeps."""
        self.requests.prefixes.load(document.number, self.requests.empty, document.state)
        self.memory.clear([block for _, blocks in places for block in blocks])
        self.windows.write(document.own, len(document.ids), places)

    def _withdraw(self, pages: Int[Tensor, " n"]) -> None:
        ids = self.pool.withdraw(pages)
        if ids is not None:
            self.requests.rename(ids)
        if self.pool.poison:  # NaN times an attention weight of 0 is NaN in other layers, too
            self.memory.data[pages] = 0

    def finish(self) -> None:
        """End the forward pass of the step, before failures and pages are reported.

        Raises:
            RuntimeError: the step's tokens did not reach all layers.
        """
        if self.computed:
            return
        self.computed = True
        self.requests.end()
        if self.metadata is not None:
            after = self.metadata.copies.after
            self.memory.copy(after)
            self.late = after if self.drafts else ()
        if not self.requests.attended:
            raise RuntimeError(_MADE_UP)

    def settle(self) -> None:
        """Copy what layers that draft have written since the forward pass, into stored prefixes."""
        late, self.late = self.late, ()
        self.memory.copy(late)

    def failures(self) -> list[int]:
        """Return the serials of failed requests, until they are freed."""
        return [*self.requests.failed.values()]

    def end(self) -> WorkerReport:
        """End a step, and report the pages of the requests of the step before.

        A step's pages are counted on the device, behind its forward pass, which the host does not
        wait for. A step without tokens has none, so it is reported with the one before.
        """
        self.finish()
        metadata, self.metadata = self.metadata, None
        assert metadata is not None, "begin is called before end"
        steps = metadata.requests.values()
        ended = _Ended(
            metadata,
            frozenset(step.request for step in steps) | self.compressed,  # may not be in the step
            self.requests.counted(kept=self.meter is not None),
            dict(self.requests.serials),
            any(step.ends_prefill for step in steps),
            self.requests.replayed,
            self.requests.prefixes.told(),
        )
        found = [] if self.unreported is None else [self._report(self.unreported)]
        self.unreported = ended
        if not steps:
            self.unreported = None
            found.append(self._report(ended))
        first = WorkerReport(metadata.step - 1)
        return replace(reduce(WorkerReport.then, found, first), begun=metadata.step)

    def _report(self, ended: _Ended) -> WorkerReport:
        """Return the report on a step, after waiting for the device to end it.

        Raises:
            RuntimeError: no captured step was launched, though no layer was called.
        """
        held = ended.held.read()
        if ended.replayed:
            for step in ended.metadata.requests.values():
                mine = held.get(step.request)
                if mine is not None and mine.computed != step.computed + step.tokens:
                    raise RuntimeError(_MADE_UP)
        told = {
            name: RequestPages(each.pages, each.computed)
            for name, each in held.items()
            if name in ended.names
        }
        prefixes, measured = ended.prefixes.read(), None
        found, stored = self.prefix_pages | prefixes, self.requests.prefixes.caches
        self.prefix_pages = {n: pages for n, pages in found.items() if n in stored}
        if self.meter is not None:
            by_serial = {ended.serials[name]: each for name, each in held.items()}
            beside = sum(self.prefix_pages.values())
            measured = self.meter.step(self.pool, by_serial, beside, read=ended.read)
        given = ended.metadata
        return WorkerReport(given.step, told, given.short, measured, prefixes=prefixes)


def _tell(request: str, error: Exception) -> None:
    logger.error("request %s fails: %s", request, error, exc_info=error)
