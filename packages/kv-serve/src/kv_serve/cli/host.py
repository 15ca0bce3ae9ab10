"""The check that vLLM is installed, for commands that run a model in it."""

import shlex
from collections.abc import Sequence

from kv_transformers.cli.console import refuse


def expect_vllm(*, policies: bool = True, served: Sequence[str] = ()) -> None:
    """Exit with an error if vLLM is not installed or, with policies, its version is unsupported.

    Args:
        policies: whether a policy is to be served.
        served: arguments of `kv-serve serve`, if that command was called.
    """
    from kv_serve.vllm import versions

    found = versions.installed()
    if found is None:
        refuse(
            "vLLM is not installed; install kv-serve into the environment of a "
            f"supported one, {versions.SERVED}{_from_checkout(served)}"
        )
    if policies and not versions.is_served(found):
        refuse(
            f"policies need {versions.SERVED}, but vLLM {found} is installed; install one of "
            "those, or omit the policy"
        )


def _from_checkout(served: Sequence[str]) -> str:
    from kv_policy.installing import checkout_of

    folder = checkout_of("kv-serve")
    if not served or folder is None or not (folder.parent.parent / "noxfile.py").is_file():
        return ""
    root = shlex.quote(str(folder.parent.parent))
    command = f"cd {root} && python -m nox -s serve -- {shlex.join(served)}"
    return f"; on a CPU, `{command}` creates such an environment and starts the server"
