"""Texts given to vLLM as if it had generated them, token by token."""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from kv_serve.vllm.names import FORCED


class Forced(AdapterLogitsProcessor):
    """Lets a request generate the tokens that its extra arguments name.

    vLLM's log-probabilities are those before any such processor, so they say how likely the model
    held each token over what is cached by then. Those of a prompt would not: a prompt is compressed
    when it has been read.
    """

    def is_argmax_invariant(self) -> bool:
        """It changes which token is taken."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """Give what puts the next token above all others; None for requests that name none."""
        tokens = (params.extra_args or {}).get(FORCED)
        if tokens is None:
            return None

        def only(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits.fill_(-torch.inf)
            logits[tokens[len(output_ids)]] = 0.0
            return logits

        return only
