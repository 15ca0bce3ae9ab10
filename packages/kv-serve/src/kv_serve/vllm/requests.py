"""What a single request asks for: a budget of its own."""

from collections.abc import Mapping
from typing import Final

from kv_policy import Budget, KVPolicy
from kv_runtime import check_budgets
from kv_serve.vllm import names
from kv_serve.vllm.nearest import strangers

KEY: Final = "kv_budget"  # of a budget in vLLM's extra arguments of a request
_TRANSFER: Final = "kv_transfer_params"  # of vLLM, for connectors that send keys and values


def requested_budget(policy: KVPolicy, extra_args: Mapping[str, object] | None) -> Budget | None:
    """Read the budget that a request gives in its extra arguments.

    Args:
        policy: the engine's.
        extra_args: of vLLM's `SamplingParams`; with the OpenAI client, `vllm_xargs`. The budget is
            a number of tokens, or a text that `Budget.parse` reads.

    Returns:
        None where the request gives no budget, and the policy's own holds.

    Raises:
        ValueError: it is no budget, the policy goes by none, or it is smaller than what the policy
            protects; or an argument was meant for kv-serve and is none.
    """
    given = (extra_args or {}).get(KEY)
    if extra_args:
        check_names(extra_args)
    if given is None:
        return None
    budget = _read(given)
    check_budgets(policy, [budget])
    return budget


def check_names(extra_args: Mapping[str, object]) -> None:
    """Refuse extra arguments that were meant for kv-serve and would change nothing.

    Raises:
        ValueError: a name begins with `kv_`, or is a misspelling of ours; or the request asks for
            a transfer of keys and values.
    """
    for name, near in strangers(extra_args, (KEY, names.FORCED), (KEY, *names.SETTINGS)):
        if near == name:
            raise ValueError(
                f"{name} is set for all requests when the engine starts; a request may bring {KEY} "
                "alone"
            )
        raise ValueError(
            f"{name} is no argument of a request, and would change nothing; did you mean {KEY}?"
        )
    # Beside a connector, vLLM's scheduler reads a table here, and ends where it is something else.
    if extra_args.get(_TRANSFER):
        raise ValueError(
            f"under a {names.KEY} keys and values are not sent between engines; leave "
            f"{_TRANSFER} out"
        )


def check_pooling(extra_kwargs: Mapping[str, object]) -> None:
    """Refuse extra arguments of a request that generates nothing.

    Raises:
        ValueError: one was meant for kv-serve.
    """
    check_names(extra_kwargs)
    if KEY in extra_kwargs:
        raise ValueError(f"{KEY} is read of requests that generate; leave it out of this one")


def _read(given: object) -> Budget:
    try:
        if isinstance(given, str):
            return Budget.parse(given)
        if isinstance(given, int | float) and not isinstance(given, bool):
            return Budget(given)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{KEY}: {error}") from error
    raise ValueError(
        f"{KEY} is {given!r:.100}; give tokens per head as 1024, a share as '25%', or bytes per "
        "token as '5760B'"
    )
