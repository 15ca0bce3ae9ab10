"""Checks of a cache's arguments and inputs."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from kv_paging import PagePool, bounds_in, declined
from kv_policy import Budget, CacheShape, HeadBasis, KVPolicy, Replay, TokenFormat, complete
from kv_policy.key_codes import MOST_CODED_DIM
from kv_runtime.bases import Bases, Folded
from kv_runtime.batch import Batch
from kv_runtime.layout import Layout
from kv_runtime.pending import unlike_drafts
from kv_runtime.shared_layer import SharedLayer


def check_reads(policy: KVPolicy, shape: CacheShape, heads: int, folded: Folded) -> None:
    """Raise if a policy reads what is unavailable.

    Raises:
        ValueError: it rotates vectors, but the rotary embedding is unknown or they are coordinates
            in a basis; or it reads the model's keys and values, but these are folded, or stored
            by other heads than the model's.
    """
    if policy.selector is None:
        return
    selector = complete(policy.selector)
    if selector.scores_once and folded and selector.reads:
        raise ValueError(
            f"{policy} scores tokens by the model's own keys and values, but the basis is folded "
            f"into the model's projections, which compute coordinates ({', '.join(sorted(folded))})"
            "; restore the model, or use a policy that scores tokens by attention, such as snapkv"
        )
    if (
        selector.scores_once
        and shape.folded is not None
        and policy.basis is not None
        and "values" in selector.reads
    ):
        raise ValueError(
            f"{policy} scores tokens by the model's own values, but this model's weights hold the "
            "value basis, so it computes coordinates; use the model as it was before, or a policy "
            "that scores tokens by attention, such as snapkv"
        )
    if selector.scores_once and heads != shape.kv_heads:
        raise ValueError(
            f"{policy} scores the tokens of each KV head, but its basis stores "
            f"{shape.kv_heads // heads} KV heads together; use a basis of single heads, such as "
            "zack, or omit one of the two"
        )
    if not selector.needs_rope:
        return
    if policy.basis is not None and not selector.scores_once:
        raise ValueError(
            f"{policy} rotates vectors to other positions, but its basis stores keys for which "
            "this is impossible; omit one of the two"
        )
    if shape.rope is None:
        raise ValueError(
            f"{policy} rotates vectors to other positions, which needs the model's rotary "
            "embedding, but this cache was made without it; use kv_transformers.CompressedCache "
            "with a model of transformers, or a policy that needs no rotation, such as snapkv"
        )


def check_basis(policy: KVPolicy, shape: CacheShape) -> None:
    """Raise if a policy stores values by a basis that are the first dimensions of their keys.

    Raises:
        ValueError: it does.
    """
    if shape.value_in_key and policy.basis is not None:
        raise ValueError(
            f"{policy} projects keys and values by a basis each, but this model has latent "
            "attention (MLA), whose token is one vector that is both: it is stored once, as the "
            "model computes it; use a policy without a basis, such as snapkv or k8v4"
        )


def check_copied(*, over_shared: bool) -> None:
    """Raise if a cache cannot be copied.

    Raises:
        ValueError: its pool is shared with other caches.
    """
    if over_shared:
        raise ValueError(
            "a cache over a shared pool cannot be copied; prefill the prompt again, or use "
            "select() to repeat its sequences"
        )


def check_merge(policy: KVPolicy, shape: CacheShape, formats: Sequence[TokenFormat]) -> None:
    """Raise if a policy merges tokens whose vectors cannot be changed one by one.

    Raises:
        ValueError: tokens are encoded together, or a token is one vector, both key and value.
    """
    if policy.selector is None or complete(policy.selector).merge is None:
        return
    if shape.value_in_key:
        raise ValueError(
            f"{policy} merges the keys and the values of tokens, but this model has latent "
            "attention (MLA), whose token is one vector that is both; use a policy that drops "
            "tokens, such as snapkv"
        )
    if any(form.block > 1 for form in formats):
        raise ValueError(
            f"{policy} merges tokens that are dropped into others, but its format encodes several "
            "tokens together, of which one cannot be changed; use a format of single tokens, such "
            "as k8v4 without keys=channel, or a policy that drops tokens, such as snapkv"
        )


def check_shift(
    policy: object, key: HeadBasis | None, softcap: float | None, sinks: Tensor | None
) -> None:
    """Raise if the basis of keys shifts them, and attention changes with a shift of all logits.

    Raises:
        ValueError: logits have a bound, or sinks, which a constant does not move along.
    """
    if key is None or key.shift is None:
        return
    if softcap is not None or sinks is not None:
        what = "attention sinks" if softcap is None else "a soft cap"
        raise ValueError(
            f"{policy} subtracts the mean key of each head, which changes the attention of layers "
            f"with {what}; use a basis without means, such as hadamard without a file"
        )


def check_prefix(shape: CacheShape, key: Tensor, value: Tensor) -> None:
    """Raise if values are not a view of the first dimensions of their keys, as the shape says.

    Raises:
        ValueError: they are not.
    """
    if shape.value_in_key and (
        value.shape != (*key.shape[:-1], shape.value_dim)
        or value.stride() != key.stride()
        or value.data_ptr() != key.data_ptr()
    ):
        raise ValueError(
            f"values of shape {tuple(value.shape)} were given, but the cache stores values in "
            f"keys; pass key[..., :{shape.value_dim}]"
        )


def check_chosen(chosen: Tensor, columns: int, before: int) -> None:
    """Raise if queries choose other columns than those of the batch and the pass.

    Raises:
        ValueError: there are more or fewer.
    """
    if chosen.shape[-1] != columns:
        raise ValueError(
            f"queries choose from {chosen.shape[-1]} columns instead of {columns}: {before} of the "
            f"batch and {columns - before} of the pass"
        )


def check_alone(alone: bool) -> None:
    """Raise if a pass with expanded vectors attends to more than its own tokens.

    Raises:
        ValueError: it does, or more than its last queries are observed.
    """
    if not alone:
        raise ValueError(
            "expanded vectors were given for a pass over stored tokens, or one whose queries are "
            "all observed; give them only if attends_alone is true"
        )


def check_replay(policy: KVPolicy, replays: bool, kinds: int) -> None:
    """Raise if a policy reads prompts a second time and that is impossible.

    Args:
        policy: the policy.
        replays: whether the engine runs the model again.
        kinds: number of different ranks of its heads.

    Raises:
        ValueError: the engine does not replay prompts, or heads are stored with different ranks.
    """
    if policy.selector is None or complete(policy.selector).replay is None:
        return
    if not replays:
        raise ValueError(
            f"{policy} reads each prompt a second time to score its tokens, which this engine does "
            "not do; use kv_serve.CompressedCache with a model of transformers, or a policy that "
            "reads prompts once, such as kv-compress"
        )
    if kinds > 1:
        raise ValueError(
            f"{policy} reads each prompt a second time, but its basis stores heads with {kinds} "
            "different ranks, for which this is not supported; use a basis of one rank, or a "
            "policy that reads prompts once, such as kv-compress"
        )


def check_reading(
    policy: KVPolicy, layout: Layout, backend: str, device: torch.device, pool: PagePool | None
) -> None:
    """Raise if what ranks a policy's pages is not aligned, or a backend cannot compute it.

    Args:
        policy: the policy.
        layout: the layout of its pages.
        backend: the attention backend.
        device: the device of the pages.
        pool: the pool that several caches share, if they do.

    Raises:
        ValueError: the pool's pages are not aligned, the backend would wait for the device in each
            step, or keys are too long for its codes.
    """
    if policy.reading is None:
        return
    if pool is not None and pool.page_bytes == layout.page_bytes:
        bounds_in(pool.padded, layout.pages[0][0])  # raises if they are not aligned
    reason = declined(backend, layout.pages[0][0], device) if backend == "triton" else None
    if reason is not None:
        raise ValueError(
            f"{policy} reads the keys of each page that a decode step fills, which waits for the "
            f"device where Triton kernels do not read them ({reason}); use backend='torch', or a "
            "format that they read, such as k8v4"
        )
    dim = layout.pages[0][0].format.key.dim
    if backend == "triton" and policy.reading.coded and dim > MOST_CODED_DIM:
        raise ValueError(
            f"{policy} ranks pages by codes of their keys, which have {dim} dimensions here; "
            f"Triton kernels encode keys of up to {MOST_CODED_DIM}: use by=bounds, or "
            "backend='torch'"
        )


def check_whole(policy: KVPolicy, replay: Replay | None, remaining: int) -> None:
    """Raise if a prompt is read in several passes that a policy reads a second time.

    Raises:
        ValueError: it is.
    """
    if replay is not None and remaining:
        raise ValueError(
            f"{policy} reads each prompt a second time, after the pass over the whole prompt; do "
            f"not split it into passes with remaining={remaining}"
        )


def check_reader(shared: SharedLayer | None, queries: int, columns: int) -> None:
    """Raise if a layer that stores its keys and values has not a query in each column.

    Only layers that read those of another may omit the first columns.
    """
    if queries > columns or (shared is None and queries < columns):
        raise ValueError(f"{queries} queries attend in a pass of {columns} columns; give one each")


def refuse_unfinished(layer: int, layers: int) -> NoReturn:
    """Raise, as the previous forward pass is unfinished.

    Raises:
        RuntimeError: always.
    """
    where = "in the replay of its prompt" if layer == layers else f"at layer {layer} of {layers}"
    raise RuntimeError(
        f"the previous forward pass stopped {where}, so the cache "
        "holds a part of it; call reset() and start again"
    )


def check_goes_on(
    batch: Batch | None, sequences: int, columns: int, remaining: int, promised: int
) -> None:
    """Raise if a pass is empty or does not match the stored batch.

    Args:
        batch: the stored batch.
        sequences: those of the pass.
        columns: columns of the pass.
        remaining: tokens of each prompt after it.
        promised: the same after the pass before.

    Raises:
        ValueError: there are no columns, the batch size differs, or tokens are fewer than promised.
    """
    if remaining < 0:
        raise ValueError(f"remaining is {remaining}; give a number of tokens, or 0")
    if columns + remaining < promised:
        raise ValueError(
            f"the pass before had remaining={promised}, but {columns + remaining} tokens of each "
            "prompt are left with this one; give the number that later passes bring, or one below "
            "it, and reset() the cache"
        )
    if columns == 0 or sequences == 0:
        raise ValueError("the prompt is empty; pass at least one sequence of at least one token")
    if batch is None:
        return
    if sequences != len(batch.seen):
        raise ValueError(
            f"the batch has {sequences} sequences, but the cache holds {len(batch.seen)}; use one "
            "cache per batch, or reset() it"
        )


def check_branch(batch: Batch | None, remaining: int, *, over_shared: bool) -> None:
    """Raise if no other cache can continue a sequence of this one.

    Raises:
        ValueError: there are no tokens, prompts are unfinished, or the pool is not shared.
    """
    if batch is None or remaining or not over_shared:
        raise ValueError(
            "a sequence is continued in another cache if it has tokens of a finished prompt, over "
            "a pool that both share; use copy.deepcopy for a cache with a pool of its own"
        )


def check_shares(
    batch: Batch | None,
    mine: KVPolicy,
    own: Bases | None,
    its: KVPolicy,
    bases: Bases | None,
    *,
    alike: bool,
) -> None:
    """Raise if a cache cannot store the prefill of another one, too.

    Args:
        batch: its batch.
        mine: the policy of the cache that attends.
        own: the bases of that one.
        its: the policy of the cache.
        bases: its bases.
        alike: whether both read a prompt again in the same way.

    Raises:
        ValueError: it holds tokens, or its basis or its replay differs.
    """
    if batch is not None:
        raise ValueError("a cache that holds tokens cannot share a prefill; reset it first")
    if not (own is bases if own is None or bases is None else own.same_as(bases)):
        raise ValueError(
            f"{its} stores vectors in another basis than {mine}, so they cannot share a prefill"
        )
    if not alike:
        raise ValueError(
            f"{its} and {mine} do not read a prompt again in the same way, so they cannot share a "
            "prefill"
        )


def check_drafts(policy: KVPolicy) -> None:
    """Raise if drafts would not be attended as decoded tokens.

    Raises:
        ValueError: they would not.
    """
    why = unlike_drafts(policy)
    if why is not None:
        raise ValueError(
            f"{policy} cannot verify drafts, as {why}; use a policy that plans after prompts "
            "alone, such as snapkv"
        )


def check_rolls_back(policy: KVPolicy, can: bool) -> None:
    """Raise unless the newest tokens can be removed.

    Raises:
        ValueError: they cannot.
    """
    if not can:
        raise ValueError(
            f"{policy} cannot take tokens back; use a policy that keeps every token and has no raw "
            "window, such as k8v4"
        )


def shared_out(
    budgets: Sequence[Budget | None] | None, sequences: int
) -> tuple[Budget | None, ...] | None:
    """Return the budget of each sequence; beams of a sequence share one.

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
    """Raise if a budget of a sequence has no effect or cannot be met.

    Raises:
        ValueError: the policy has no budget, protects more tokens than a budget allows, or plans
            each chunk of a prompt and a budget is a share of it.
    """
    selector = None if policy.selector is None else complete(policy.selector)
    for budget in budgets or ():
        if budget is not None and selector is None:
            raise ValueError(f"{policy} keeps every token, so a budget of {budget} has no effect")
        if budget is None or selector is None:
            continue
        if selector.budget is None:
            raise ValueError(
                f"{policy} keeps tokens by its own rule, so a budget of {budget} has no "
                "effect; omit the budget, or change the policy's parameters"
            )
        if selector.plans_chunks:
            budget.expect_tokens(str(policy))
        if budget.unit == "tokens" and budget.amount < selector.protected:
            raise ValueError(
                f"a budget of {budget} tokens is smaller than the {selector.protected} that "
                f"{policy} protects; give at least that many"
            )
