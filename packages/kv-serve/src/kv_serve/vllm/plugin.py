"""The vLLM plugin entry point of kv-serve."""

from kv_serve.vllm.names import CUSTOM, OVERRIDES


def register() -> None:
    """Register our attention backends; vLLM calls this in every process, possibly repeatedly.

    An engine without `kv_policy` in its `additional_config` is unchanged, except that misspelled
    names are rejected. On a GPU a policy needs `--attention-backend CUSTOM`, which `kv-serve serve`
    sets.
    """
    _watch()
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cuda():
        register_backend(AttentionBackendEnum.CUSTOM, CUSTOM)
        return
    if not current_platform.is_cpu():
        init_logger("vllm.kv_serve").warning(
            "kv-serve supports policies on CPUs and NVIDIA GPUs; on %s a kv_policy in "
            "additional_config has no effect",
            current_platform.device_name,
        )
        return
    for name, path in OVERRIDES.items():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], path)


def _watch() -> None:
    """Install the checks of configurations and requests, in a supported vLLM."""
    from kv_serve.vllm.versions import installed, is_served

    if is_served(installed() or ""):
        from kv_serve.vllm.admission import watch

        watch()
