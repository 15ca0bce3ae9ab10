"""Layers that vLLM keeps on a CPU: their attention is not over all tokens."""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from kv_serve.vllm.backend import argument
from kv_serve.vllm.config import UnservableError
from kv_serve.vllm.names import KEY
from kv_serve.vllm.reader import FullImpl
from kv_serve.vllm.shape import attention_layers, is_whole


class KeptImpl(CPUAttentionBackendImpl):
    """The stock implementation, of a layer beside those under the policy."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Create the stock implementation; vLLM passes the arguments.

        Raises:
            UnservableError: the layer does not belong to a decoder.
        """
        super().__init__(*given, **named)
        if self.attn_type != AttentionType.DECODER:
            raise UnservableError(
                "a layer of this model has attention that is not decoder attention; a kv_policy "
                "cannot serve it"
            )
        self.config = get_current_vllm_config()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Check that the policy has an effect; vLLM calls this after the weights load.

        Raises:
            UnservableError: no layer has full attention.
        """
        super().process_weights_after_loading(act_dtype)
        if not attention_layers(self.config):
            raise UnservableError(
                "no layer of this model attends to all tokens: each has a window, or state of its "
                f"own, of a fixed size, so a {KEY} would have no effect; remove it from "
                "additional_config"
            )


class CpuImpl(FullImpl):
    """Ours for layers of full attention, and the stock implementation for all others."""

    def __new__(cls, *given: Any, **named: Any) -> AttentionImpl:
        """Return an implementation for a layer; vLLM passes the arguments."""
        window = argument("sliding_window", given, named)
        whole = is_whole(get_current_vllm_config(), window)
        return super().__new__(cls, *given, **named) if whole else KeptImpl(*given, **named)
