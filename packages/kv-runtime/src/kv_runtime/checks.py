"""What a cache refuses of a policy, in sentences."""

from collections.abc import Sequence
from typing import NoReturn

from kv_policy import Budget, CacheShape, KVPolicy, complete
from kv_runtime.batch import Batch


def check_reads(policy: KVPolicy, shape: CacheShape) -> None:
    """Refuse a policy that reads what cannot be given.

    Raises:
        ValueError: it turns queries, and there is no rotary embedding or a basis in the way.
    """
    if policy.selector is None or "queries" not in complete(policy.selector).reads:
        return
    if policy.basis is not None:
        raise ValueError(
            f"{policy} turns queries to other positions, and its basis stores keys where that "
            "cannot be done; leave one of the two out"
        )
    if shape.rope is None:
        raise ValueError(
            f"{policy} turns queries to other positions, which needs the model's rotary embedding, "
            "and this host does not know it; use kv_serve.CompressedCache with a model of "
            "transformers, or a policy that reads no queries"
        )


def refuse_unfinished(layer: int, layers: int) -> NoReturn:
    """Refuse a pass that begins before the one before it has ended.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"the forward pass before this one stopped at layer {layer} of {layers}, so the cache "
        "holds a part of it; call reset() and start anew"
    )


def check_goes_on(batch: Batch | None, sequences: int, columns: int) -> None:
    """Refuse a pass over nothing, or that does not go on from what is held.

    Raises:
        ValueError: no columns, or another batch size than before.
    """
    if columns == 0 or sequences == 0:
        raise ValueError("the prompt is empty; give at least one sequence of at least one token")
    if batch is None:
        return
    if sequences != len(batch.seen):
        raise ValueError(
            f"the batch has {sequences} sequences and the cache holds {len(batch.seen)}; use one "
            "cache per batch, or reset() it"
        )


def shared_out(
    budgets: Sequence[Budget | None] | None, sequences: int
) -> tuple[Budget | None, ...] | None:
    """Give each sequence its budget; beams of a sequence share theirs.

    Raises:
        ValueError: the sequences are not a multiple of the budgets.
    """
    if budgets is None:
        return None
    if sequences % len(budgets):
        raise ValueError(
            f"{len(budgets)} budgets were given for a batch of {sequences}; give one for each "
            "sequence (beams of a sequence share theirs)"
        )
    beams = sequences // len(budgets)
    return tuple(b for b in budgets for _ in range(beams))


def check_budgets(policy: KVPolicy, budgets: Sequence[Budget | None] | None) -> None:
    """Refuse budgets of sequences that have no meaning, or cannot be met.

    Raises:
        ValueError: the policy goes by no budget, or protects more than a budget allows.
    """
    selector = None if policy.selector is None else complete(policy.selector)
    for budget in budgets or ():
        if budget is not None and selector is None:
            raise ValueError(f"{policy} keeps every token, so a budget of {budget} has no meaning")
        if budget is None or selector is None:
            continue
        if selector.budget is None:
            raise ValueError(
                f"{policy} keeps what its own rule says, so a budget of {budget} has no "
                "meaning; leave the budget out, or change the policy's parameters"
            )
        if budget.unit == "tokens" and budget.amount < selector.protected:
            raise ValueError(
                f"a budget of {budget} tokens is smaller than the {selector.protected} that "
                f"{policy} protects; give at least that many"
            )
