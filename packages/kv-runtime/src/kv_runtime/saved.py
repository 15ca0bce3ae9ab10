"""A cache's state as named tensors and a few facts, independent of pages, pool and device.

This is the one list of what a cache keeps between passes: slots of every store, raw windows, counts
of tokens and columns, and the state of plans. `PolicyCache.state` and `PolicyCache.restore` use it.
A state may come from an untrusted file: everything is compared with the shape of the
cache before memory is allocated for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_paging import SavedRows, restore_rows, saved_rows
from kv_policy import Budget, CacheShape, CompleteSelector, KVPolicy, PageLayout
from kv_runtime.bases import Bases
from kv_runtime.batch import Batch
from kv_runtime.layout import Layout
from kv_runtime.retain.plans import Plans, TurnCounts

_DTYPES = (torch.float32, torch.float64)  # of thresholds


class DamagedStateError(ValueError):
    """A state contradicts itself, or the facts that it is of."""


@dataclass(frozen=True)
class CacheFacts:
    """What a state is of; two caches whose facts agree store the same tokens in the same bytes.

    Attributes:
        policy: the text of the policy.
        sizes: layers, KV heads, and dimensions of keys and values, as stored.
        dtype: of the model's vectors, such as `bfloat16`.
        sequences: B.
        columns: columns of the batch, including padding.
        basis: digest of the projections of the policy's basis, if it has one.
        levels: digest of what the policy's formats took from a file, if they did.
        folded: the vectors whose projection is folded into the model.
        turns: which sequences are to be planned, if the policy has a selector.
        budgets: budgets of the sequences that have their own, as text.
    """

    policy: str
    sizes: tuple[int, int, int, int]
    dtype: str
    sequences: int
    columns: int
    basis: str | None = None
    levels: str | None = None
    folded: tuple[str, ...] = ()
    turns: TurnCounts | None = None
    budgets: tuple[str | None, ...] | None = None


@dataclass(frozen=True)
class CacheState:
    """The state of a cache between passes: tensors on the CPU by name, and facts."""

    facts: CacheFacts
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.nbytes for x in self.tensors.values())


def sizes_of(shape: CacheShape) -> tuple[int, int, int, int]:
    """Return the sizes of a stored shape, as in `CacheFacts`."""
    return shape.layers, shape.kv_heads, shape.key_dim, shape.value_dim


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as in `CacheFacts`."""
    return str(dtype).removeprefix("torch.")


def facts_of(
    policy: KVPolicy, layout: Layout, bases: Bases | None, batch: Batch, plans: Plans | None
) -> CacheFacts:
    """Return what the state of a batch is of."""
    return CacheFacts(
        policy=str(policy),
        sizes=sizes_of(layout.shape),
        dtype=name_of(layout.shape.dtype),
        sequences=len(batch.seen),
        columns=batch.columns,
        basis=None if bases is None else bases.digest(),
        levels=layout.digest,
        folded=() if bases is None else tuple(sorted(bases.folded)),
        turns=None if plans is None else plans.turns,
        budgets=None if plans is None else plans.budget_texts,
    )


def tensors_of(batch: Batch, plans: Plans | None) -> dict[str, Tensor]:
    """List the state of a batch; synchronizes with the device.

    Raises:
        ValueError: the batch is over a pool shared with others.
    """
    if batch.record is None:
        raise ValueError(
            "a cache over a shared pool cannot be saved; use a cache with a pool of its own"
        )
    found = {"seen": _copied(batch.seen), "columns": _copied(batch.record.held)}
    for i, store in enumerate(batch.tiers.parts):
        rows = saved_rows(store)
        found[f"store.{i}.length"] = rows.length
        found |= {f"store.{i}.part.{j}": part for j, part in enumerate(rows.parts)}
        beside = {"score": rows.score, "position": rows.position}
        found |= {f"store.{i}.{name}": x for name, x in beside.items() if x is not None}
    if batch.window is not None:
        found |= {f"window.{k}": _copied(x) for k, x in batch.window.tensors().items()}
    if plans is not None:
        last = {"budget": plans.budget, "thresholds": plans.thresholds}
        found |= {f"plan.{name}": _copied(x) for name, x in last.items() if x is not None}
    return found


def expect_facts(policy: KVPolicy, layout: Layout, bases: Bases | None, facts: CacheFacts) -> None:
    """Raise if a state is not of a cache with this policy, these sizes, this basis and levels.

    Raises:
        ValueError: it is of another policy, another shape or dtype, another basis or other levels.
    """
    if facts.policy != str(policy):
        raise ValueError(f"it is of the policy {facts.policy}, not of {policy}; use that policy")
    here = (*sizes_of(layout.shape), name_of(layout.shape.dtype))
    if (*facts.sizes, facts.dtype) != here:
        words = "layers, KV heads, dimensions of keys and of values, and dtype"
        raise ValueError(
            f"it is of another model: {words} are {(*facts.sizes, facts.dtype)}, but here {here}"
        )
    folded = () if bases is None else tuple(sorted(bases.folded))
    if facts.folded != folded:
        raise ValueError(
            f"the basis was folded into the model's {' and '.join(facts.folded) or 'nothing'} when "
            f"it was saved, but is into {' and '.join(folded) or 'nothing'} here; use "
            "kv_transformers.Fold as it was used then"
        )
    basis = None if bases is None else bases.digest()
    if (facts.basis, facts.levels) != (basis, layout.digest):
        raise ValueError(
            f"the calibration of {policy} has changed since it was saved; use the file of then, or "
            "compress again"
        )


def expect_state(layout: Layout, state: CacheState) -> None:
    """Raise unless the tensors of a state fit each other and the layout; allocates nothing.

    Raises:
        DamagedStateError: a tensor is missing, unknown, or of another dtype or shape, or a count, a
            position or a length is impossible.
    """
    try:
        _expect(layout, state)
    except ValueError as error:
        raise DamagedStateError(str(error)) from None


def _expect(layout: Layout, state: CacheState) -> None:
    facts, tensors = state.facts, state.tensors
    sequences, heads = facts.sequences, layout.shape.kv_heads
    if min(sequences, facts.columns) < 1:
        raise ValueError(f"it holds {sequences} sequences of {facts.columns} columns")
    seen = _taken(tensors, "seen", torch.int64, (sequences,))
    columns = _taken(tensors, "columns", torch.bool, (sequences, facts.columns))
    if not torch.equal(columns.sum(1), seen):
        raise ValueError("the tokens seen are not those of its columns")
    held = torch.zeros(layout.shape.layers, sequences, heads, dtype=torch.long)
    lead = layout.shape.layers, sequences, heads
    stores = _stores(layout, lead)
    kind = torch.tensor(layout.kind)
    for i, (page, (cells, many, each), of) in enumerate(stores):
        rows = _rows(tensors, i, page)
        _named(f"store.{i}", rows, page, (cells, many, each))
        live = rows.live
        if rows.position is not None:
            _expect_positions(f"store.{i}", rows, seen, holes=page.format.block > 1)
        if len(layout.shapes) == 1:
            held += live
        else:
            layer, head = (kind == of).nonzero().T
            held[layer, :, head] += live[:, :, 0]
    window = layout.window_tensors(sequences)
    for name, (dtype, shape) in window.items():
        _taken(tensors, f"window.{name}", dtype, shape)
    whole = seen.clamp(max=layout.window)[None, :, None] + held
    if bool((whole > seen[None, :, None]).any()):
        raise ValueError("a head holds more tokens than its sequence has")
    keeps_all = facts.turns is None
    if keeps_all and not torch.equal(whole, seen[None, :, None].expand_as(whole)):
        raise ValueError("a head lacks tokens, but the policy keeps all")
    known = {"seen", "columns", *(f"window.{name}" for name in window)}
    for i, (page, _, _) in enumerate(stores):
        known |= _names(i, page)
    if not keeps_all:
        known |= {"plan.budget", "plan.thresholds"}
    if strange := sorted(tensors.keys() - known):
        raise ValueError(f"it holds unknown tensors: {', '.join(strange[:5])}")


def plans_of(layout: Layout, selector: CompleteSelector | None, state: CacheState) -> Plans | None:
    """Return the state of plans, which `expect_state` has not compared; None: no selector.

    Raises:
        DamagedStateError: it does not fit the sequences, or a budget is no budget.
    """
    facts, shape = state.facts, layout.shape
    if (facts.turns is None) != (selector is None):
        raise DamagedStateError(f"its plans are not those of {facts.policy}")
    if facts.turns is None or selector is None:
        return None
    lead = selector.tiers, shape.layers, facts.sequences, shape.kv_heads
    try:
        return _plans(facts, facts.turns, state.tensors, lead)
    except ValueError as error:
        raise DamagedStateError(str(error)) from None


def _plans(
    facts: CacheFacts,
    turns: TurnCounts,
    tensors: Mapping[str, Tensor],
    lead: tuple[int, int, int, int],
) -> Plans:
    turns.expect(facts.sequences)
    if facts.budgets is not None and len(facts.budgets) != facts.sequences:
        raise ValueError(f"{len(facts.budgets)} budgets are given for {facts.sequences} sequences")
    budgets = None
    if facts.budgets is not None:
        budgets = tuple(None if text is None else Budget.parse(text) for text in facts.budgets)
    budget = thresholds = None
    if "plan.budget" in tensors:
        budget = _taken(tensors, "plan.budget", torch.int64, (facts.sequences,))
        if bool((budget < 0).any()) or bool((budget >= 2**31).any()):
            raise ValueError(f"budgets of {budget.tolist()} tokens are impossible")
    if "plan.thresholds" in tensors:
        given = tensors["plan.thresholds"].dtype
        dtype = given if given in _DTYPES else _DTYPES[0]
        thresholds = _taken(tensors, "plan.thresholds", dtype, lead)
    return Plans(turns, budgets, budget, thresholds)


def fill(batch: Batch, state: CacheState) -> None:
    """Store a state, which `expect_state` has accepted, in an empty batch.

    Raises:
        kv_paging.PoolExhausted: a fixed pool is too small; the batch is to be thrown away.
    """
    tensors, parts = state.tensors, batch.tiers.parts
    saved = [_rows(tensors, i, store.layout) for i, store in enumerate(parts)]
    batch.pool.reserve(
        sum(
            int((-(-rows.length.long() // store.layout.tokens)).sum())
            for rows, store in zip(saved, parts, strict=True)
        )
    )
    for rows, store in zip(saved, parts, strict=True):
        restore_rows(store, rows)
    device = batch.seen.device
    held, seen = tensors["columns"].to(device), tensors["seen"].to(device)
    if batch.window is not None:
        mine = {k.removeprefix("window."): x for k, x in tensors.items() if k.startswith("window.")}
        batch.window.restore({name: x.to(device) for name, x in mine.items()}, seen)
    batch.seen, batch.columns = seen.clone(), held.shape[1]
    batch.started = bool((seen > 0).all())
    if batch.record is not None:
        batch.record.append(held)


def _copied(x: Tensor) -> Tensor:
    """Copy to the CPU: the next pass changes the cache's own tensors."""
    return x.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _stores(
    layout: Layout, lead: tuple[int, int, int]
) -> list[tuple[PageLayout, tuple[int, int, int], int]]:
    """Return the page layout, the table rows and the kind of heads of each store, in order."""
    if len(layout.shapes) == 1:
        return [(page, lead, 0) for page in layout.stored_pages(0)]
    kinds = torch.tensor(layout.kind)
    cells = [int((kinds == kind).sum()) for kind in range(len(layout.shapes))]
    return [
        (page, (count, lead[1], 1), kind)
        for kind, count in enumerate(cells)
        for page in layout.stored_pages(kind)
    ]


def _names(index: int, page: PageLayout) -> set[str]:
    parts = {f"part.{j}" for j in range(len(page.format.parts))}
    stored = {"length": True, "score": page.scores, "position": page.positions}
    beside = {name for name, there in stored.items() if there}
    return {f"store.{index}.{name}" for name in parts | beside}


def _rows(tensors: Mapping[str, Tensor], index: int, page: PageLayout) -> SavedRows:
    def taken(name: str) -> Tensor:
        return _given(tensors, f"store.{index}.{name}")

    return SavedRows(
        taken("length"),
        tuple(taken(f"part.{j}") for j in range(len(page.format.parts))),
        taken("score") if page.scores else None,
        taken("position") if page.positions else None,
    )


def _named(name: str, rows: SavedRows, page: PageLayout, lead: tuple[int, int, int]) -> None:
    try:
        rows.expect(page, lead)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _expect_positions(name: str, rows: SavedRows, seen: Tensor, *, holes: bool) -> None:
    """Raise unless positions are those of tokens seen, or -1 for holes."""
    assert rows.position is not None
    table_row = torch.repeat_interleave(rows.length.flatten().long())
    sequence = table_row // rows.length.shape[2] % rows.length.shape[1]
    if bool(((rows.position < -holes) | (rows.position >= seen[sequence])).any()):
        raise ValueError(f"{name}: a position is not that of a token seen")


def _given(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"the tensor {name} is missing")
    return tensors[name]


def _taken(
    tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: Sequence[int]
) -> Tensor:
    found = _given(tensors, name)
    if found.dtype != dtype or tuple(found.shape) != tuple(shape):
        raise ValueError(
            f"{name} should be {dtype} of {(*shape,)}, found {found.dtype} of {(*found.shape,)}"
        )
    return found
