"""Find the model that a layer becomes part of, for hosts that see only the layer."""

from collections.abc import Callable
from weakref import finalize, ref

from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook


class Outermost:
    """Searches for the outermost module around a layer while a model is built.

    A model registers submodules, directly or in others, until it is complete, so each module that
    takes in another and contains the layer is the outermost so far.
    """

    def __init__(self, is_layer: Callable[[Module | None], bool]) -> None:
        """Begin with the next module that is registered; `is_layer` must not refer to this."""
        self._top: Module | None = None
        search = ref(self)  # a model that fails to load is not kept, and its search ends

        def see(outer: Module, name: str, inner: Module | None) -> None:
            known = search()
            if known is None:
                return
            top = known._top
            if is_layer(inner) if top is None else inner is top or top in outer.modules():
                known._top = outer

        self._end = finalize(self, register_module_module_registration_hook(see).remove)

    def found(self) -> Module | None:
        """End the search, and return the outermost module; None if the layer is in none."""
        self._end()
        return self._top
