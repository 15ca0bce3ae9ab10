"""The attention backend of `--attention-backend CUSTOM` on a GPU.

On a CPU only its choices are tested; running it needs a GPU.
"""

from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import KVCacheLayout

from kv_serve.vllm.served import ServesPolicy
from kv_serve.vllm.switch import checked, names_policy


class CustomBackend(ServesPolicy, AttentionBackend):
    """A backend for policies only, as CUSTOM has no stock implementation.

    vLLM treats undeclared features, such as sliding windows, sinks and latent attention, as
    unsupported and rejects them itself.
    """

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's enumeration, by which it looks backends up."""
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout with one page per KV head, consecutive in a block, as on a CPU."""
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return our implementation.

        Raises:
            UnservableError: the configuration has no policy, or this vLLM is not supported.
        """
        if not names_policy():
            from kv_serve.vllm.config import UnservableError

            raise UnservableError(
                "the attention backend CUSTOM is kv-serve's here and needs a policy; set "
                "kv_policy in additional_config, or omit --attention-backend"
            )
        checked()
        from kv_serve.vllm.reader import FullImpl

        return FullImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return our builder."""
        from kv_serve.vllm.slots import SlotBuilder

        return SlotBuilder
