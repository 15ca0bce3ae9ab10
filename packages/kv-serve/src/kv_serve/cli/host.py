"""vLLM as what a command runs a model in."""

from kv_serve.cli.console import refuse


def expect_vllm(*, policies: bool = True) -> None:
    """Refuse where no vLLM is installed, or, if there are to be policies, one that has none."""
    from kv_serve.vllm import versions

    found = versions.installed()
    if found is None:
        refuse(
            "vLLM is not installed here, and it is what serves: install kv-serve into the "
            f"environment of one, {versions.SERVED}"
        )
    if policies and not versions.is_served(found):
        refuse(
            f"policies are served in {versions.SERVED}, and this is vLLM {found}; install one of "
            "those, or go without a policy"
        )
