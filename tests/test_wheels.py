"""What a wheel lacks of its source is noticed."""

from pathlib import Path
from zipfile import ZipFile

from tools.wheels import lacking, package_of


def test_a_file_that_was_left_out_is_named(tmp_path: Path) -> None:
    source = tmp_path / "src"
    (source / "kv_one").mkdir(parents=True)
    for name in ("__init__.py", "tuned.json", "lib.so", "old.pyc"):
        (source / "kv_one" / name).write_text("")
    wheel = tmp_path / "kv_one-0.1.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as file:
        file.writestr("kv_one/__init__.py", "")
    assert package_of(wheel) == "kv-one"
    assert lacking(wheel, source) == ["kv_one/tuned.json"]
    with ZipFile(wheel, "a") as file:
        file.writestr("kv_one/tuned.json", "")
    assert lacking(wheel, source) == []
