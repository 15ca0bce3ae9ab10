"""Whether figures of ours are those of native code."""


def expect_native() -> None:
    """Raise if attention on this CPU would run in torch, as it does where native code is missing.

    Raises:
        RuntimeError: kv-cpu is not installed, does not load, or was built from other sources.
    """
    import torch

    if torch.cuda.is_available():
        return
    from kv_cpu import missing

    reason = missing()
    if reason is not None:
        raise RuntimeError(f"nothing of ours is measured, as native code does not run: {reason}")
