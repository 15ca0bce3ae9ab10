"""vLLM's own attention on a CPU, until a configuration names a policy."""

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kv_serve.vllm.names import KEY
from kv_serve.vllm.served import ServesPolicy


def names_policy() -> bool:
    """Say whether the current configuration names a policy in its `additional_config`."""
    config = get_current_vllm_config_or_none()
    return (
        config is not None
        and isinstance(config.additional_config, dict)
        and KEY in config.additional_config
    )


def policy_impl() -> type[AttentionImpl]:
    """Give our implementation, imported only when vLLM is known to be one that it fits.

    Raises:
        UnservableError: this vLLM is not one that is served.
    """
    from kv_serve.vllm.adapters import check_vllm

    check_vllm()
    from kv_serve.vllm.backend import PagedImpl

    return PagedImpl


class CpuBackend(ServesPolicy, CPUAttentionBackend):
    """Stock in everything but the choice of the implementation.

    vLLM picks one backend class for all engines of a process, so the class cannot be the choice:
    it is made when a layer asks for its implementation, when its configuration is known.
    That implementation then gives its layer a backend of its own. Without a policy nothing of ours
    is imported.
    """

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Ours under a policy, the stock one otherwise.

        Raises:
            UnservableError: a policy is named, and this vLLM is not one that is served.
        """
        if names_policy():
            return policy_impl()
        stock: type[AttentionImpl] = CPUAttentionBackend.get_impl_cls()
        return stock
