"""The entry point through which vLLM finds kv-serve."""

from kv_serve.vllm.names import CUSTOM, OVERRIDES


def register() -> None:
    """Put our attention in front of vLLM's; called in every process of vLLM, any number of times.

    Nothing changes for an engine without `kv_policy` in its `additional_config`, except that names
    which are nearly that are refused. On a GPU a policy is served under
    `--attention-backend CUSTOM`, as `kv-serve serve` sees to.
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
            "kv-serve serves policies on CPUs and on NVIDIA GPUs; on %s a kv_policy in "
            "additional_config changes nothing",
            current_platform.device_name,
        )
        return
    for name, path in OVERRIDES.items():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], path)


def _watch() -> None:
    """Let configurations and requests be checked, in a vLLM that is known."""
    from kv_serve.vllm.versions import installed, is_served

    if is_served(installed() or ""):
        from kv_serve.vllm.admission import watch

        watch()
