"""Layers that vLLM keeps on a CPU: their attention is not over all tokens, or they draft."""

from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kv_serve.vllm.backend import PagedBackend, argument
from kv_serve.vllm.config import UnservableError, check_dtype
from kv_serve.vllm.drafters import DraftSpec, lead
from kv_serve.vllm.names import KEY
from kv_serve.vllm.reader import FullImpl
from kv_serve.vllm.served import Kept
from kv_serve.vllm.shape import attention_layers, is_whole
from kv_serve.vllm.storage import BilledPages


class DraftBackend(AttentionBackend):
    """Base of the stock backend of a layer that drafts for a model in pages."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec of a group without layers of the model."""
        return DraftSpec.of(spec) if type(spec) is FullAttentionSpec else spec


@cache
def drafting(chosen: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return the backend of layers that draft, from the one that vLLM chose."""
    return type(DraftBackend.__name__, (DraftBackend, chosen), {"__module__": __name__})


class KeptImpl(Kept, CPUAttentionBackendImpl):
    """The stock implementation, of a layer beside those under the policy."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Create the stock implementation; vLLM passes the arguments.

        Raises:
            UnservableError: the layer does not belong to a decoder; or it drafts, and reads what a
                layer of the model stores, or stores it as another option says.
        """
        super().__init__(*given, **named)
        if self.attn_type != AttentionType.DECODER:
            raise UnservableError(
                "a layer of this model has attention that is not decoder attention; a kv_policy "
                "cannot serve it"
            )
        self.config = get_current_vllm_config()
        self.drafts = is_in_pages(self.config)  # vLLM has loaded the model, and loads a drafter
        if not self.drafts:
            return
        check_dtype(argument("kv_cache_dtype", given, named))
        target = argument("kv_sharing_target_layer_name", given, named)
        if target is not None:
            raise UnservableError(
                f"a layer that drafts reads the keys of {target}, which may be in pages; omit the "
                "speculative_config, or use a policy with one format for all tokens, such as k8v4"
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Check that the policy has an effect; vLLM calls this after the weights load.

        A layer that drafts gets a group of its own.

        Raises:
            UnservableError: no layer has full attention.
        """
        super().process_weights_after_loading(act_dtype)
        if self.drafts:
            layers = self.config.compilation_config.static_forward_context.values()
            own = next(each for each in layers if getattr(each, "impl", None) is self)
            own.attn_backend = drafting(own.attn_backend)
            lead()
            return
        if not attention_layers(self.config):
            raise UnservableError(
                "no layer of this model attends to all tokens: each has a window, or state of its "
                f"own, of a fixed size, so a {KEY} would have no effect; remove it from "
                "additional_config"
            )


def is_in_pages(config: VllmConfig) -> bool:
    """Return whether layers of a model are in pages already, as when vLLM loads a drafter."""
    layers = config.compilation_config.static_forward_context.values()
    backends = (each.attn_backend for each in layers if isinstance(each, Attention))
    ours = (each for each in backends if issubclass(each, PagedBackend))
    return any(isinstance(each.storage, BilledPages) for each in ours)


class CpuImpl(FullImpl):
    """Ours for layers of full attention, and the stock implementation for all others.

    It is the stock one for all layers that draft for a model in pages.
    """

    def __new__(cls, *given: Any, **named: Any) -> AttentionImpl:
        """Return an implementation for a layer; vLLM passes the arguments."""
        window, config = argument("sliding_window", given, named), get_current_vllm_config()
        ours = is_whole(config, window) and not is_in_pages(config)
        return super().__new__(cls, *given, **named) if ours else KeptImpl(*given, **named)
