"""Latent attention (MLA) on a CPU: vLLM's own, rejected under a policy."""

from vllm.v1.attention.backend import MLAAttentionImpl
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from kv_serve.vllm.switch import names_policy


class CpuLatentBackend(CPUMLABackend):
    """The stock backend; it raises if a policy is configured."""

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        """Return the stock implementation.

        Raises:
            UnservableError: the configuration has a policy.
        """
        _refuse_policy()
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
        _refuse_policy()
        stock: type[MLAAttentionImpl] = AMXMLABackend.get_impl_cls()
        return stock


def _refuse_policy() -> None:
    if names_policy():
        from kv_serve.vllm.config import UnservableError

        raise UnservableError(
            "this model has latent attention (MLA): it stores one vector for all heads, but a "
            "kv_policy needs keys and values per head; remove kv_policy from additional_config"
        )
