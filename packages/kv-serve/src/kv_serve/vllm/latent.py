"""Latent attention (MLA) on a CPU: vLLM's own, or latents stored in one format under a policy.

Without a policy none of our implementation is imported.
"""

from vllm.v1.attention.backend import MLAAttentionImpl
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from kv_serve.vllm.served import ServesPolicy
from kv_serve.vllm.switch import checked, names_policy


class CpuLatentBackend(ServesPolicy, CPUMLABackend):
    """The stock backend except for the choice of the implementation."""

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        """Return our implementation under a policy, and the stock one otherwise.

        Raises:
            UnservableError: a policy is configured, but this vLLM is not supported.
        """
        if names_policy():
            checked()
            from kv_serve.vllm.latent_slots import LatentImpl

            return LatentImpl
        stock: type[MLAAttentionImpl] = CPUMLABackend.get_impl_cls()
        return stock


class AmxLatentBackend(AMXMLABackend):
    """The stock backend; it raises if a policy is configured."""

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        """Return the stock implementation.

        Raises:
            UnservableError: the configuration has a policy.
        """
        if names_policy():
            from kv_serve.vllm.config import UnservableError

            raise UnservableError(
                "vLLM's latent attention (MLA) for AMX reads earlier tokens of a prompt as they "
                "are, and a kv_policy compresses them; choose --attention-backend CPU_MLA"
            )
        stock: type[MLAAttentionImpl] = AMXMLABackend.get_impl_cls()
        return stock
