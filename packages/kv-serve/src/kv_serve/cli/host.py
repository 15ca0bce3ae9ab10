"""vLLM as what a command runs a model in."""

import shlex
from collections.abc import Sequence

from kv_transformers.cli.console import refuse


def expect_vllm(*, policies: bool = True, served: Sequence[str] = ()) -> None:
    """Refuse where no vLLM is installed, or, if there are to be policies, one that has none.

    Args:
        policies: whether a policy is to be served.
        served: arguments of `kv-serve serve`, if that is what was called.
    """
    from kv_serve.vllm import versions

    found = versions.installed()
    if found is None:
        refuse(
            "vLLM is not installed here, and it is what serves: install kv-serve into the "
            f"environment of one, {versions.SERVED}{_from_checkout(served)}"
        )
    if policies and not versions.is_served(found):
        refuse(
            f"policies are served in {versions.SERVED}, and this is vLLM {found}; install one of "
            "those, or go without a policy"
        )


def _from_checkout(served: Sequence[str]) -> str:
    from kv_policy.installing import checkout_of

    folder = checkout_of("kv-serve")
    if not served or folder is None or not (folder.parent.parent / "noxfile.py").is_file():
        return ""
    root = shlex.quote(str(folder.parent.parent))
    command = f"cd {root} && python -m nox -s serve -- {shlex.join(served)}"
    return f"; on a CPU, `{command}` makes such an environment and serves"
