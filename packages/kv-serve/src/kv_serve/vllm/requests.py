"""The policy of an engine and the budget of a single request, read from texts."""

import functools
from collections.abc import Mapping
from typing import Final

from kv_policy import Budget, KVPolicy, parse
from kv_runtime import check_budgets
from kv_serve.vllm import names
from kv_serve.vllm.nearest import strangers

KEY: Final = "kv_budget"  # the budget in a request's extra arguments
NAMES: Final = (KEY, names.PREFIX)  # that a request may set
# Why a request may not name a boundary.
TOKENS_ALONE: Final = "needs a prompt of tokens alone, without pictures or embeddings"
_TRANSFER: Final = "kv_transfer_params"  # vLLM's own, for connectors that transfer keys and values


@functools.cache
def policy_of(text: str) -> KVPolicy:
    """Parse a policy, with a cache so that installed packages are scanned once per text.

    Raises:
        ValueError: the text is not a policy.
    """
    return parse(text)


def requested_budget(policy: KVPolicy, extra_args: Mapping[str, object] | None) -> Budget | None:
    """Read a request's budget from its extra arguments.

    Args:
        policy: the engine's.
        extra_args: of vLLM's `SamplingParams`; with the OpenAI client, `vllm_xargs`. The budget is
            a number of tokens, or a text for `Budget.parse`.

    Returns:
        None if the request has no budget; the policy's own budget then applies.

    Raises:
        ValueError: the budget is invalid, the policy has no budget, or the budget is smaller than
            the policy's protected tokens; or an argument is a misspelled or misplaced name of
            kv-serve.
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
    """Raise if extra arguments were meant for kv-serve but have no effect.

    Raises:
        ValueError: a name begins with `kv_` or is a misspelling of ours, or the request asks for
            a transfer of keys and values.
    """
    for name, near in strangers(extra_args, (*NAMES, names.FORCED), (*NAMES, *names.SETTINGS)):
        if near == name:
            raise ValueError(
                f"{name} is set for all requests when the engine starts; a request may only set "
                f"{' and '.join(NAMES)}"
            )
        meant = near if near in NAMES else KEY
        raise ValueError(
            f"{name} is not a request argument and would have no effect; did you mean {meant}?"
        )
    # With a connector, vLLM's scheduler expects a dict here and crashes on anything else.
    if extra_args.get(_TRANSFER):
        raise ValueError(
            f"with a {names.KEY} keys and values are not sent between engines; omit {_TRANSFER}"
        )


def requested_prefix(extra_args: Mapping[str, object] | None) -> int | None:
    """Read the number of tokens that a request compresses by themselves, for others to continue.

    Raises:
        ValueError: it is not a number of 1 or more.
    """
    given = (extra_args or {}).get(names.PREFIX)
    if given is None:
        return None
    if isinstance(given, float) and given.is_integer():  # as JSON of some clients has it
        given = int(given)
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(
            f"{names.PREFIX} is {given!r:.100}; give the number of first tokens of the prompt that "
            "are compressed by themselves, 1 or more"
        )
    return given


def check_pooling(extra_kwargs: Mapping[str, object]) -> None:
    """Raise if a request that generates nothing has extra arguments of kv-serve.

    Raises:
        ValueError: one was meant for kv-serve.
    """
    check_names(extra_kwargs)
    for name in NAMES:
        if name in extra_kwargs:
            raise ValueError(
                f"{name} applies to requests that generate tokens; omit it from this one"
            )


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
