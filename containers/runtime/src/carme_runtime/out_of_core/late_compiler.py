"""Keeps PyTorch's compiler (`torch._dynamo`) out of memory until a program uses it.

Optimizers, dispatch modes and checkpoints import it only to name functions that it must not trace. As long as
it is not loaded it traces nothing, so a stand-in module without content does for them. Any other use loads
the compiler by an ordinary import, and removes the stand-in.
"""

import importlib
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

_PACKAGE, _NAME = "torch", "_dynamo"
_COMPILER = f"{_PACKAGE}.{_NAME}"
_CACHE = "__dynamo_disable"  # where `torch._disable_dynamo` caches what `disable` returned for a function
_HOOKS = "torch.utils.checkpoint"  # The module disables hooks that live for one recomputation.

_named: weakref.WeakSet[FunctionType] = weakref.WeakSet()  # functions that the compiler must not trace
# Of `_named`, and of whether the compiler loads. What the garbage collector calls may name another function.
_lock = threading.RLock()


def load_late(before: Callable[[], None]) -> None:
    """Let the compiler load when a program uses more of it than PyTorch's optimizers do.

    Nothing where it is loaded already, or where this PyTorch has none.

    Args:
        before: Called before it loads, in the thread that uses it.
    """
    if _COMPILER in sys.modules or (spec := importlib.util.find_spec(_COMPILER)) is None:
        return
    parts = {
        # What `torch.utils.checkpoint` reads, and changes only while something is traced.
        "config": {"error_on_nested_fx_trace": True},
        # What `init_process_group` clears, in case it was filled too early.
        "trace_rules": {"clear_lru_cache": lambda: None},
    }
    modules = {
        name: _StandIn(ModuleType(f"{_COMPILER}.{name}"), before, known) for name, known in parts.items()
    }
    known = {"disable": _disable, "graph_break": _break_graph} | modules
    stand_in = _StandIn(importlib.util.module_from_spec(spec), before, known)
    sys.modules[_COMPILER] = stand_in
    setattr(sys.modules[_PACKAGE], _NAME, stand_in)
    sys.meta_path.insert(0, _Submodules())


class _StandIn(ModuleType):
    """A module of the compiler until that is loaded. Who still has it afterwards gets the real one's content.

    Args:
        module: An empty one, whose name and place it takes over.
        before: See `load_late`.
        known: What PyTorch uses where nothing is compiled, by its name.
    """

    before: Callable[[], None]
    known: Mapping[str, Any]

    def __init__(self, module: ModuleType, before: Callable[[], None], known: Mapping[str, Any]) -> None:
        super().__init__(module.__name__)
        vars(self).update(vars(module), before=before, known=known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what walks through all modules requests these
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        if name in self.known and _is_waiting():
            return self.known[name]
        return getattr(_load(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_load(self.__name__), name, value)


class _Submodules(MetaPathFinder):
    """Loads the compiler before a program imports one of its modules, as an ordinary import does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_COMPILER}."):
            return None
        _load(_COMPILER)
        if (module := sys.modules.get(fullname)) is None:
            return importlib.util.find_spec(fullname)
        return ModuleSpec(fullname, _Loaded(module))


class _Loaded(Loader):
    """Lets an import end with the module that has been loaded meanwhile, instead of loading it twice.

    Args:
        module: That one.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has set its own


def _is_waiting() -> bool:
    """Whether the stand-in is still there."""
    return isinstance(sys.modules.get(_COMPILER), _StandIn)


def _load(name: str) -> ModuleType:
    """A module of the compiler, which is loaded now unless it has been before.

    While it is imported no lock is held but those of Python's import, so that threads import each module once
    and whole.

    Raises:
        ImportError: It cannot be loaded; later imports of it try again, as always.
    """
    stand_in = sys.modules.get(_COMPILER)
    if not isinstance(stand_in, _StandIn):
        return importlib.import_module(name)
    stand_in.before()
    with _lock:
        if _is_waiting():  # no other thread was faster
            sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Submodules)]
            del sys.modules[_COMPILER]
            vars(sys.modules[_PACKAGE]).pop(_NAME, None)
    try:
        importlib.import_module(_COMPILER)
    finally:
        with _lock:
            for function in list(_named):  # PyTorch names each of them again at its next call
                vars(function).pop(_CACHE, None)
            _named.clear()
    return importlib.import_module(name)


def _disable(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """What runs a function untraced: itself, where PyTorch requests that and nothing is traced."""
    if type(fn) is FunctionType:
        is_cached = kwargs.get("wrapping") is False  # a call by `torch._disable_dynamo`
        # Another thread that loads it looks through the names once. A small window stays: PyTorch caches what
        # this returns after the lock. If the compiler has loaded by then, it may trace the function.
        with _lock:
            if (is_cached or fn.__module__ == _HOOKS) and _is_waiting():
                if is_cached:
                    _named.add(fn)
                return fn
    return _load(_COMPILER).disable(fn, *args, **kwargs)


def _break_graph(*args: Any, **kwargs: Any) -> None:
    """End a traced part of the program. There is none while nothing is traced."""
    if not _is_waiting():
        _load(_COMPILER).graph_break(*args, **kwargs)
