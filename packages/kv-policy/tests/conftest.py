"""Settings of property tests, and a registry with the entries of a test."""

from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest
from hypothesis import settings

from kv_policy import Part, Raw, registry

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make exactly the given parts, and raw, the installed ones."""

    def use(*parts: type[Part]) -> None:
        classes = {part.name: part for part in (Raw, *parts)}

        class Entry(EntryPoint):
            def load(self) -> type[Part]:
                return classes[self.name]

        entries = [
            Entry(name, f"test:{part.__name__}", "kv_policy") for name, part in classes.items()
        ]
        monkeypatch.setattr(registry, "entry_points", lambda group: entries)

    return use
