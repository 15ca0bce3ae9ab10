"""Validation of a selector's return values."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kv_policy import (
    CompleteSelector,
    LayerView,
    Merge,
    MergeView,
    Part,
    PlanView,
    Selector,
)


def expect_scores(
    selector: Selector, view: LayerView, given: object, method: str = "score"
) -> Float[Tensor, "B H L"]:
    """Return scores as float32; they must be floats with the shape of the view.

    Args:
        selector: the selector.
        view: what it was given.
        given: what it returned.
        method: the method that returned it.

    Raises:
        ValueError: the type, dtype or shape is wrong.
    """
    shape = tuple(view.position.shape)
    if isinstance(given, Tensor) and given.is_floating_point() and given.shape == shape:
        return given.float()
    raise ValueError(
        f"{_called(selector)} scored layer {int(view.layer[0])} with {_kind(given)}; "
        f"{method}(view) returns floats of the shape of view.position, {shape}: one for each "
        "sequence, KV head and token"
    )


def expect_rescored(selector: Selector, view: LayerView, given: object) -> Float[Tensor, "B H L"]:
    """Return the scores of a plan as float32; synchronizes with the device, as plans do.

    Raises:
        ValueError: the type, dtype or shape is wrong, or scores are NaN.
    """
    score = expect_scores(selector, view, given, "rescore")
    if bool(lacks_numbers(view, score)):
        raise ValueError(
            f"{_called(selector)} rescored layer {int(view.layer[0])} with NaN, though its inputs "
            "have no NaN; a score is a finite number, or infinity for a token that is always "
            "kept. It may divide by a sum that is 0. Nothing was planned by these scores"
        )
    return score


def expect_plan(selector: Selector, view: PlanView, given: object) -> Tensor:
    """Return a plan, which must be uint8 tiers with the shape of the view.

    Raises:
        ValueError: the type, dtype or shape is wrong.
    """
    shape = tuple(view.position.shape)
    if isinstance(given, Tensor) and given.dtype == torch.uint8 and given.shape == shape:
        return given
    raise ValueError(
        f"{_called(selector)} planned from layer {view.first_layer} on with {_kind(given)}; "
        f"plan(view) returns uint8 of the shape of view.position, {shape}: a tier, or DROP"
    )


def expect_merge(selector: Selector, view: MergeView, given: object) -> Merge:
    """Return a merge, whose targets must be kept tokens and whose weights numbers.

    Synchronizes with the device, as plans do.

    Raises:
        ValueError: the type, a dtype or a shape is wrong, a target is no kept token of the view, or
            a weight is NaN or infinite.
    """
    shape, where = tuple(view.position.shape), f"{_called(selector)} merged layer"
    where = f"{where} {int(view.layer[0])}"
    if not isinstance(given, Merge):
        raise ValueError(f"{where} with {_kind(given)}; merge(view) returns a Merge")
    for name, x, wanted in (
        ("target", given.target, (*shape, given.weight.shape[-1])),
        ("weight", given.weight, (*shape, given.weight.shape[-1])),
        ("own", given.own, shape),
        ("threshold", given.threshold, shape[:2]),
    ):
        if x is None:
            continue
        kind = x.is_floating_point() != (name == "target")
        if tuple(x.shape) != wanted or not kind:
            raise ValueError(
                f"{where} with {name} {_kind(x)}; it must be "
                f"{'integers' if name == 'target' else 'floats'} of shape {wanted}"
            )
    used = (given.weight != 0) & view.dropped[..., None]
    inside = (given.target >= 0) & (given.target < shape[-1])
    place = given.target.long().where(inside, 0)
    kept = view.kept[..., None].expand_as(place).gather(2, place) & inside
    numbers = [given.weight.where(used, 0)]
    numbers += [] if given.own is None else [given.own.where(view.kept, 1)]
    numbers += [] if given.threshold is None else [given.threshold]
    if bool((used & ~kept).any()):
        raise ValueError(
            f"{where} into a token that is not kept; a target is the index of a kept token of the "
            "same head, or the weight is 0"
        )
    if not all(bool(x.isfinite().all()) for x in numbers):
        raise ValueError(
            f"{where} with weights or thresholds that are not finite; it may divide by a sum that "
            "is 0. Nothing was merged by them"
        )
    return given


def lacks_numbers(view: LayerView, score: Float[Tensor, "B H L"]) -> Bool[Tensor, ""]:
    """Return, on the device, whether a score is NaN although the view has no NaN.

    NaN from the model, such as by float16 overflow, is not an error of the selector.
    """
    queries = None if view.queries is None else view.queries.vectors
    looked_at = (view.mass, view.keys, view.values, queries, view.score, *view.also.values())
    wrong = (score.isnan() & (view.position >= 0)).any()
    if wrong.device.type == "cpu" and not wrong:
        return wrong  # reading it waits for nothing, and the vectors need not be read
    for x in looked_at:
        if x is not None:
            wrong = wrong & ~x.isnan().any()
    return wrong


def expect_numbers(selector: Selector, wrong: list[Bool[Tensor, ""]]) -> None:
    """Raise if `lacks_numbers` found NaN; synchronizes with the device once.

    Raises:
        ValueError: scores are NaN.
    """
    if wrong and bool(torch.stack(wrong).any()):
        layer = torch.stack(wrong).nonzero()[0].item()
        raise ValueError(
            f"{_called(selector)} returned NaN scores (in scoring {layer + 1} of "
            f"{len(wrong)} of this pass), though its inputs have no NaN; a score is a finite "
            "number, or infinity for a token that is always kept. It may divide by a sum that "
            "is 0. The pass is not stored: reset() the cache"
        )


def _called(selector: Selector) -> str:
    while isinstance(selector, CompleteSelector):
        selector = selector.selector
    return selector.name if isinstance(selector, Part) else type(selector).__name__


def _kind(given: object) -> str:
    if isinstance(given, Tensor):
        return f"{str(given.dtype).removeprefix('torch.')} of shape {tuple(given.shape)}"
    return f"a {type(given).__name__}"
