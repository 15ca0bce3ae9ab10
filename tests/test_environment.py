"""What pip was told reaches uv, and a machine without a GPU gets no CUDA."""

import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.tags import sys_tags
from packaging.version import Version

from tools import environment
from tools.environment import Torch

TAG = next(iter(sys_tags()))
LISTING = """\
:env:.find-links='first second'
global.cert='/etc/certificates.pem'
global.extra-index-url='https://one.example/a\\nhttps://two.example/b'
global.find-links='ignored'
install.timeout='7'
"""


def wheel(version: str, tag: str = str(TAG)) -> str:
    return f"torch-{version}-{tag}.whl"


def test_the_environment_wins_over_pips_files() -> None:
    assert environment.pip_options(LISTING)["find-links"] == "first second"


def test_pips_options_become_uvs_variables() -> None:
    assert environment.uv_variables(environment.pip_options(LISTING), {}) == {
        "UV_FIND_LINKS": "first,second",
        "UV_INDEX": "https://one.example/a https://two.example/b",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/etc/certificates.pem",
        "UV_HTTP_TIMEOUT": "7",
    }


def test_a_variable_that_is_set_is_left_alone() -> None:
    environ = {"UV_FIND_LINKS": "mine", "UV_INDEX": "mine"}
    variables = environment.uv_variables(environment.pip_options(LISTING), environ)
    assert not variables.keys() & {"UV_FIND_LINKS", "UV_INDEX", "UV_INDEX_STRATEGY"}


def test_without_configuration_nothing_is_said() -> None:
    assert environment.uv_variables(environment.pip_options(""), {}) == {}


def test_without_pip_there_is_no_configuration(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert environment.configured(str(python)) == {}


def test_the_newest_cpu_build_for_this_interpreter_is_taken() -> None:
    names = [
        wheel("2.9.0+cpu"),
        wheel("2.10.0+cpu"),
        wheel("2.12.0+cu130"),
        wheel("2.12.0"),
        wheel("2.12.0+cpu", "cp27-cp27m-manylinux1_x86_64"),
        f"torchvision-2.12.0+cpu-{TAG}.whl",
        "README.txt",
    ]
    assert environment.cpu_torch(names) == Version("2.10.0+cpu")


def test_no_cpu_build_is_no_version() -> None:
    assert environment.cpu_torch([wheel("2.12.0")]) is None


def test_a_page_of_links_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "links.html"
    name = wheel("2.10.0+cpu")
    page.write_text(f'<a href="files/{name.replace("+", "%2B")}#sha256=0">torch</a>')

    def opened(location: str, timeout: float) -> object:
        return page.open("rb")

    monkeypatch.setattr(environment.urllib.request, "urlopen", opened)
    assert list(environment.links("https://wheels.example/links.html")) == [name]


def uv_that_ends(folder: Path, code: int) -> str:
    uv = folder / "uv"
    uv.write_text(f"#!/bin/sh\ncat > /dev/null\nexit {code}\n")
    uv.chmod(0o755)
    return str(uv)


def test_with_a_gpu_the_ordinary_build_is_taken(tmp_path: Path) -> None:
    (tmp_path / wheel("2.10.0+cpu")).touch()
    variables = {"UV_FIND_LINKS": str(tmp_path)}
    assert environment.choose_torch(variables, uv_that_ends(tmp_path, 0), gpu=True) == Torch()


@pytest.mark.parametrize("spell", [str, lambda folder: folder.as_uri()], ids=["path", "uri"])
def test_a_cpu_wheel_in_a_folder_comes_first(tmp_path: Path, spell) -> None:
    (tmp_path / wheel("2.10.0+cpu")).touch()
    variables = {"UV_FIND_LINKS": f"elsewhere,{spell(tmp_path)}"}
    chosen = environment.choose_torch(variables, uv_that_ends(tmp_path, 0), gpu=False)
    assert chosen == Torch(requirement="torch==2.10.0+cpu")


@pytest.mark.parametrize(("code", "backend"), [(0, "cpu"), (1, None)])
def test_then_the_index_of_cpu_builds_if_it_answers(
    tmp_path: Path, code: int, backend: str | None
) -> None:
    variables = {"UV_FIND_LINKS": ""}
    chosen = environment.choose_torch(variables, uv_that_ends(tmp_path, code), gpu=False)
    assert chosen == Torch(backend=backend)


@pytest.mark.skipif(environment.has_gpu(), reason="a machine with a GPU may have CUDA")
@pytest.mark.skipif(sys.platform != "linux", reason="only there torch brings CUDA by itself")
def test_a_cpu_build_of_torch_brings_no_cuda() -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("no CPU build of torch was offered to this environment")
    names = {distribution.metadata["Name"] for distribution in distributions()}
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-"))]
