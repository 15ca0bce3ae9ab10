"""Teacher forcing in vLLM, token by token."""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from kv_serve.vllm.names import FORCED


class Forced(AdapterLogitsProcessor):
    """Make a request generate the tokens in its extra arguments.

    vLLM's log-probabilities are computed before such a processor, so they are the model's
    likelihoods of each token given the cache at that step. Those of a prompt would not be: a prompt
    is compressed after it has been read.
    """

    def is_argmax_invariant(self) -> bool:
        """Return False: the processor changes the chosen token."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """Return a function that forces the next token; None for requests without forced tokens."""
        tokens = (params.extra_args or {}).get(FORCED)
        if tokens is None:
            return None

        def only(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits.fill_(-torch.inf)
            logits[tokens[len(output_ids)]] = 0.0
            return logits

        return only
