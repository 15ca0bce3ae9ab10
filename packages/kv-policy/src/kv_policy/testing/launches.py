"""Detection of reads that make the host wait for a device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS: Final = frozenset(
    {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__index__", "__float__"}
)
WAITS: Final = frozenset(
    {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "is_nonzero"}
)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            raise AssertionError(f"{func} reads numbers on the host")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in WAITS:
            raise AssertionError(f"{func} makes the host wait")
        return func(*args, **(kwargs or {}))


@contextmanager
def reading_raises() -> Iterator[None]:
    """Raise AssertionError where the host reads numbers of a tensor, on any device."""
    operations = _Operations()  # type: ignore[no-untyped-call]  # torch declares no types here
    with _Functions(), operations:
        yield
