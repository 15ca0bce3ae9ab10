"""vLLM's CPU attention backend, replaced by ours if the configuration has a policy."""

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kv_serve.vllm.names import KEY
from kv_serve.vllm.served import ServesPolicy


def names_policy() -> bool:
    """Return whether the current configuration has a policy in its `additional_config`."""
    config = get_current_vllm_config_or_none()
    return (
        config is not None
        and isinstance(config.additional_config, dict)
        and KEY in config.additional_config
    )


def checked() -> None:
    """Check vLLM before any of our implementation is imported.

    Raises:
        UnservableError: this vLLM is not supported.
    """
    from kv_serve.vllm.adapters import check_vllm, complete_loader

    check_vllm()
    complete_loader()


class CpuBackend(ServesPolicy, CPUAttentionBackend):
    """The stock backend except for the choice of the implementation.

    vLLM picks one backend class for all engines of a process, so the choice is made when a layer
    requests its implementation and its configuration is known. That implementation then sets a
    backend of its own on the layer. Without a policy none of our implementation is imported.

    vLLM derives a class from this one for attention that is not over all tokens, such as chunks.
    """

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return our implementation under a policy, and the stock one otherwise.

        Raises:
            UnservableError: a policy is configured, but this vLLM is not supported.
        """
        if names_policy():
            checked()
            from kv_serve.vllm.kept import CpuImpl, KeptImpl

            return CpuImpl if cls is CpuBackend else KeptImpl
        stock: type[AttentionImpl] = CPUAttentionBackend.get_impl_cls()
        return stock
