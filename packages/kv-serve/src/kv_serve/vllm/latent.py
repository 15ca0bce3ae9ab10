"""Latent attention (MLA) on a CPU: vLLM's own, rejected under a policy."""

from vllm.v1.attention.backend import MLAAttentionImpl
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from kv_serve.vllm.switch import names_policy


class CpuLatentBackend(CPUMLABackend):
    """The stock backend; it raises if a policy is configured."""

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        """Return the stock implementation; raise UnservableError if there is a policy."""
        return _stock(CPUMLABackend)


class AmxLatentBackend(AMXMLABackend):
    """The stock backend; it raises if a policy is configured."""

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        """Return the stock implementation; raise UnservableError if there is a policy."""
        return _stock(AMXMLABackend)


def _stock(backend: type[CPUMLABackend | AMXMLABackend]) -> type[MLAAttentionImpl]:
    """Return the implementation of a backend.

    Raises:
        UnservableError: the configuration has a policy.
    """
    if names_policy():
        from kv_serve.vllm.config import UnservableError

        raise UnservableError(
            "this model has latent attention (MLA): it stores one vector for all heads, but a "
            "kv_policy needs keys and values per head; remove kv_policy from additional_config"
        )
    stock: type[MLAAttentionImpl] = backend.get_impl_cls()
    return stock
