"""The law of a selector whose scores are running means or sums over queries."""

import torch

from kv_policy.complete import CompleteSelector
from kv_policy.lifecycle import RunningSum
from kv_policy.testing.laws import law
from kv_policy.testing.views import DrawnTokens


def check_running(selector: CompleteSelector, tokens: DrawnTokens) -> None:
    """Check that scores equal the declared running mean or sum, those of new tokens as well.

    Args:
        selector: the selector; nothing is checked if its `running` is None.
        tokens: its view when one token has arrived in each sequence.
    """
    running = selector.running
    if running is None:
        return
    law(
        selector.observe.generated,
        "running updates scores during generation, so observe must have generated=True",
    )
    law(
        isinstance(running, RunningSum) or selector.observe.skip == 1,
        "running is a mean over the queries after a token, so observe must have skip=1",
    )
    for layer in range(tokens.shape.layers):
        view = tokens.layer(layer)
        assert view.mass is not None  # generated queries are observed
        assert view.seen is not None
        before = view.length[:, None, None] - 1
        want = running.update(view.score, view.position, before, view.mass, view.seen)
        found = selector.score(view)
        for label, some in (("stored", ~view.fresh), ("new", view.fresh)):
            some = some & (view.position >= 0)
            law(
                bool(torch.isclose(found[some], want[some], rtol=1e-4, atol=1e-6).all()),
                f"score of a {label} token, for which a generated query was observed, differs from "
                "running",
            )
