"""What `--attention-backend CUSTOM` names on a GPU.

Only a GPU can confirm this module; on a CPU its choices are tested, and nothing is run by them.
"""

from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import KVCacheLayout

from kv_serve.vllm.served import ServesPolicy
from kv_serve.vllm.switch import names_policy, policy_impl


class CustomBackend(ServesPolicy, AttentionBackend):
    """Nothing of vLLM's stands behind this name, so it serves policies and nothing else.

    What is not said here, such as sliding windows, sinks and latent attention, vLLM takes as not
    supported, and refuses with its own words.
    """

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration; it looks backends up by this."""
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks with a page of each KV head one after the other, as on a CPU."""
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Give our implementation.

        Raises:
            UnservableError: the configuration names no policy, or this vLLM is not served.
        """
        if not names_policy():
            from kv_serve.vllm.config import UnservableError

            raise UnservableError(
                "the attention backend CUSTOM is kv-serve's here and serves a policy; name one as "
                "kv_policy in additional_config, or leave --attention-backend out"
            )
        return policy_impl()

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Ours."""
        from kv_serve.vllm.slots import SlotBuilder

        return SlotBuilder
