"""Everything that is run on this repository: `nox -l` lists the sessions.

Each session makes the environment it needs and keeps it for the next time. Packages are found on
the disk: a new folder under packages/ needs no edit here.
"""

import shutil
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).parent))  # nox does not put this folder on the path

from tools.sessions import (
    BENCHMARKS,
    benchmark,
    build_settings,
    built,
    check_siblings,
    install,
    install_vllm,
    install_wheel,
    mkdocs,
    native,
    pytest,
    variables,
)
from tools.workspace import (
    EXAMPLES,
    PACKAGES,
    ROOT,
    declared,
    declared_by_extras,
    editable,
    extras,
    first_example,
    flags,
)

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]

NATIVE = "kv-cpu"  # the package that is compiled
HOSTS = ("kv-serve", "kv-eval")  # have tests that run inside vLLM
SLOW = (
    "kv-runtime",
    "kv-eval",
    "kv-cpu",
)  # have tests with the mark `slow`, beside those inside vLLM
ACROSS = "across"  # the tests of tests/ and examples/, which need all packages at once
LONG, LONGEST = 500, 800  # lines of a source file that warn, and the most there may be
# As users run it: no shape is checked in an installed wheel. `tests` has checked all of them.
UNCHECKED = ("-o", "addopts=--import-mode=importlib --strict-config --strict-markers")
# What runs under sanitizers: vectors with masks at their ends, and tiles that plain C++ stands for,
# so that it is seen what they read. Kernels of all sets are one source.
WATCHED = "avx512,amx-emulated"
PEERS = BENCHMARKS / "peers"  # other projects that ours is measured beside


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
    install_wheel(session, package, tests=True)
    chosen = ("-m", "not model and not slow", *UNCHECKED)  # `tests` ran those of the model
    pytest(session, f"packages/{package}/tests", *chosen)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def example(session: nox.Session, package: str) -> None:
    """Installs the wheel alone into an empty environment and runs the first example of its README.

    Nothing is there but what the package declares.
    """
    install_wheel(session, package, tests=False)
    code = first_example(ROOT / "packages" / package / "README.md")
    with session.chdir(session.create_tmp()):  # where what it writes is in nobody's way
        session.run("python", "-c", code, env=variables(session))


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
    """Checks style, format, the arrows between packages, and the length of source files."""
    install(session, groups=("lint",))
    constraints, variables = build_settings(session)
    session.install("--no-deps", *editable(PACKAGES), *constraints, env=variables)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache")
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        lines = len(path.read_text().splitlines())
        if lines > LONGEST:
            session.error(f"{path} has {lines} lines; split it, {LONGEST} are the most")
        if lines >= LONG:
            session.warn(f"{path} has {lines} lines; does it still hold one idea?")


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
    """Opens the documentation and a report in Chromium; `-- FOLDER` keeps pictures."""
    install(session, *editable(["kv-eval[cpu]"]), "playwright>=1.50", groups=("docs", "model"))
    mkdocs(session)
    alone = str(Path(session.create_tmp()).resolve() / "alone")
    session.run("python", "-m", "tools.alone", alone, env=variables(session))
    session.run("python", "-m", "tools.browser", "site", alone, *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Shows a real model answering from compressed caches; what follows -- goes to the demo."""
    if native(session):
        try:
            install(session, *editable(["kv-eval[cpu]"]), groups=("model",))
        except CommandFailed:
            session.warn("kv-cpu cannot be built here, as is said above: torch attends instead")
            install(session, *editable(["kv-eval"]), groups=("model",))
    else:
        install(session, *editable(["kv-eval"]), groups=("model",))
    # The path as it can be typed here: the demo ends with commands to go on with.
    command = Path(session.bin).resolve() / "kv-serve"
    typed = str(command.relative_to(ROOT) if command.is_relative_to(ROOT) else command)
    session.run(typed, "demo", *session.posargs, env=variables(session), external=True)


@nox.session
def serve(session: nox.Session) -> None:
    """Serves a model by vLLM on the CPU: `nox -s serve -- MODEL --policy POLICY`."""
    left_out = () if native(session) else (NATIVE,)
    install_vllm(session, groups=("model",), without=left_out)
    # After Ctrl-C the server finishes what it is asked and ends its engine.
    patience = {"interrupt_timeout": 30, "terminate_timeout": 10}
    session.run("kv-serve", "serve", *session.posargs, env=variables(session), **patience)


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
def slow(session: nox.Session) -> None:
    """Runs the tests that repeat at scale what others show, and then those inside vLLM."""
    install(session, *editable(["kv-eval[cpu]"]), groups=("test",), own="kv-eval")
    pytest(session, *(f"packages/{name}/tests" for name in SLOW), "-m", "slow")
    session.notify("vllm", ("-m", "slow"))


@nox.session
def sanitize(session: nox.Session) -> None:
    """Runs the tests of native code built to notice what C++ leaves undefined.

    That is reads and writes out of bounds or of freed memory, and undefined behaviour; the first
    one ends the run. Two instruction sets are tried, `sanitize-all` tries all that run here.
    """
    sanitized(session, WATCHED)


@nox.session(name="sanitize-all")
def sanitize_all(session: nox.Session) -> None:
    """Runs what `sanitize` runs under every instruction set that this machine has."""
    sanitized(session, "")


def sanitized(session: nox.Session, instructions: str) -> None:
    """Builds native code with gcc's sanitizers, and runs its tests under instruction sets."""
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
        "KV_CPU_TESTED": instructions,
    }
    pytest(session, f"packages/{NATIVE}/tests", "-m", "not slow", *UNCHECKED, env=options)


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
    # By itself xdist leaves the files of few tests for the end, and here those take longest.
    pytest(session, *(f"packages/{name}/tests/vllm" for name in HOSTS), "--no-loadscope-reorder")
