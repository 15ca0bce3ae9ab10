"""What kv-serve uses of vLLM is compared with sources that are only parsed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from zipfile import ZipFile

import griffe
import pytest

from tools import upstream

SOURCES = {
    "__init__.py": "",
    "config/__init__.py": "from vllm.config.model import ModelConfig",
    "config/model.py": """
from functools import cached_property

class ModelConfig:
    def get_vocab_size(self, padded=False): ...
    @property
    def use_mla(self): ...
    @cached_property
    def uses_mrope(self): ...
""",
    "base.py": """
import abc
class Base(abc.ABC):
    def __init__(self, first, *, second=None): ...
    @classmethod
    def make(cls, spec, **more): ...
""",
    "spec.py": """
from dataclasses import dataclass, field
from vllm.base import Base

@dataclass(frozen=True)
class Spec:
    size: int
    heads: int = 1
    made: int = field(default=0, init=False)

class Ours(Base):
    def step(self, tokens): ...
""",
}


@pytest.fixture
def vllm(tmp_path: Path) -> griffe.Module:
    for name, text in SOURCES.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return upstream.parse(tmp_path)


@pytest.fixture
def said(vllm: griffe.Module, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def compared(
        *lines: tuple[str, bool], imports: Sequence[tuple[tuple[str, str], ...]] = ()
    ) -> list[str]:
        monkeypatch.setattr(upstream, "lines", lambda version: list(lines))
        monkeypatch.setattr(upstream, "imported", lambda version: list(imports))
        return upstream.differences(vllm)

    return compared


def test_interfaces_that_are_as_they_were_are_not_listed(said) -> None:
    assert not said(
        ("vllm.config:ModelConfig.get_vocab_size()", False),
        ("vllm.config:ModelConfig.use_mla", True),
        ("vllm.config:ModelConfig.uses_mrope", True),
        ("vllm.spec:Ours.__init__(first, second)", True),
        ("vllm.spec:Ours.make(spec)", False),
        ("vllm.spec:Ours.make(spec, more)", True),
        ("vllm.spec:Ours.step(tokens)", True),
        ("vllm.spec:Spec.__init__(size, heads)", True),
        ("vllm.spec:Spec.__init__(size)", False),
        imports=[(("vllm.config", "ModelConfig"),), (("vllm.base", ""),), (("vllm", "spec"),)],
    )


@pytest.mark.parametrize(
    ("line", "exact", "found"),
    [
        ("vllm.spec:Ours.step(tokens, more)", True, "takes (tokens), not (tokens, more)"),
        ("vllm.spec:Ours.__init__()", False, "takes (first, second), not ()"),
        ("vllm.spec:Spec.__init__(size, made)", False, "takes (size, heads), not (size, made)"),
        ("vllm.spec:Ours.leave()", True, "vllm.spec has no Ours.leave"),
        ("vllm.gone:Ours", True, "vllm.gone has no Ours"),
        ("vllm.spec:Ours.step", True, "Ours.step is not a property"),
    ],
)
def test_interfaces_that_differ_are(said, line, exact, found) -> None:
    (each,) = said((line, exact))
    assert each.endswith(found)


def test_names_that_moved_are_listed(said) -> None:
    found = said(imports=[(("vllm.config", "Gone"),), (("vllm.gone", ""),)])
    assert found == ["vllm.config has no Gone", "there is no module vllm.gone"]


def test_every_import_of_ours_is_known_with_its_module() -> None:
    found = upstream.imported()
    assert (("vllm.config", "VllmConfig"),) in found
    assert (("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager"),) in found
    assert all(module.split(".")[0] == "vllm" for each in found for module, _ in each)


def test_a_name_that_moved_between_versions_is_found_in_either(tmp_path: Path, said) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "module.py").write_text(
        "if new:\n    from vllm.spec import Spec\nelse:\n    from vllm.gone import Spec\n"
        "from vllm.base import Base\n"
    )
    moved = (("vllm.spec", "Spec"), ("vllm.gone", "Spec"))
    assert upstream.imported(ours) == [(("vllm.base", "Base"),), moved]
    assert said(imports=[moved]) == []
    assert said(imports=[moved[1:]]) == ["vllm.gone has no Spec"]


def test_a_version_is_compared_with_what_is_imported_of_it(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "if _since(0, 33):\n    from vllm.new import Spec\nelse:\n    from vllm.old import Spec\n"
        "def late():\n    if not _since(0, 30):\n        from vllm import older\n"
        "    if _since(0, 31):\n        from vllm.log import level\n"
    )
    old, new = (("vllm.old", "Spec"),), (("vllm.new", "Spec"),)
    log, older = (("vllm.log", "level"),), (("vllm", "older"),)
    assert upstream.imported(tmp_path, "0.29.0") == [older, old]
    assert upstream.imported(tmp_path, "0.32.1") == [log, old]
    assert upstream.imported(tmp_path, "0.33.0") == [log, new]
    assert upstream.imported(tmp_path) == [older, log, (*new, *old)]


def test_a_version_is_compared_in_its_own_form() -> None:
    named = {
        version: {line.partition("(")[0].rpartition(".")[2] for line, _ in upstream.lines(version)}
        for version in ("0.29.0", "0.30.0", "")
    }
    assert "has_pending_block_frees" not in named["0.29.0"]
    assert "has_pending_block_frees" in named["0.30.0"] & named[""]
    assert "allocate_slots" in named["0.29.0"] - named["0.30.0"] - named[""]
    assert upstream.lines("0.33.0") == upstream.lines()


def test_a_wheel_gives_its_sources_alone(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    with ZipFile(wheel, "w") as archive:
        names = ("vllm/__init__.py", "vllm/_C.so", "vllm/model_executor/models/llama.py", "x/y.py")
        for name in names:
            archive.writestr(name, "")
    folder = upstream.extract(wheel, tmp_path / "sources")
    found = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    assert found == {"vllm/__init__.py", "x/y.py"}


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"give a version .* or a checkout of vLLM"):
        upstream.parse(tmp_path)


def test_the_command_says_what_is_missing(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["upstream", str(tmp_path)])
    assert upstream.main() == 2
    assert "give a version on the package index" in capsys.readouterr().err
