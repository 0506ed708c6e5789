"""Keeps PyTorch's compiler (`torch._dynamo`) out of memory until a program uses it.

Optimizers and modes load it at their first use, only to name what it shall not trace. It takes about 70 MiB,
half of them with what it imports. As long as it is not loaded it traces nothing, so there is nothing to name.
"""

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

_PACKAGE, _NAME = "torch", "_dynamo"
_FULL_NAME = f"{_PACKAGE}.{_NAME}"
_KEPT = "__dynamo_disable"  # where `torch._disable_dynamo` keeps what `disable` gave for a function
_lock = threading.RLock()


def load_late(before: Callable[[], None]) -> None:
    """Let the compiler load when a program uses more of it than PyTorch's optimizers do.

    Nothing where it is loaded already.

    Args:
        before: Called before it loads.
    """
    module = sys.modules.get(_FULL_NAME)
    if isinstance(module, _Unloaded):
        module.before = before
        return
    spec = None if module is not None else importlib.util.find_spec(_FULL_NAME)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update(before=before, named=[])
    module.__class__ = _Unloaded
    sys.modules[_FULL_NAME] = module
    setattr(sys.modules[_PACKAGE], _NAME, module)
    sys.meta_path.insert(0, _Parts())


class _Unloaded(ModuleType):
    """The package until it is loaded.

    Attributes:
        before: Called before it loads.
        named: Functions that it shall not trace, with what runs in their place until then.
    """

    before: Callable[[], None]
    named: list[tuple[FunctionType, Callable[..., Any]]]

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """End a traced part of the program: there is none."""
        if type(self) is not _Unloaded:  # it was kept by its address
            self.__dict__["graph_break"](*args, **kwargs)

    def disable(self, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        """What runs a function untraced; without one, what gives that for a function."""
        if type(self) is _Unloaded and fn is None:
            return lambda function: self.disable(function, *args, **kwargs)
        if type(self) is not _Unloaded or type(fn) is not FunctionType:
            _load(self)
            return self.__dict__["disable"](fn, *args, **kwargs)
        real: Callable[..., Any] | None = None

        @functools.wraps(fn)
        def untraced(*values: Any, **names: Any) -> Any:
            nonlocal real
            if type(self) is _Unloaded:
                return fn(*values, **names)
            if real is None:
                real = self.__dict__["disable"](fn, *args, **kwargs)
            return real(*values, **names)

        self.named.append((fn, untraced))
        return untraced

    @property
    def trace_rules(self) -> Any:
        """What `init_process_group` forgets, in case it was looked up too early: nothing was."""
        return _Part(self, "trace_rules", {"clear_lru_cache": lambda: None})

    @property
    def config(self) -> Any:
        """What `torch.utils.checkpoint` reads each time, and uses where something is traced."""
        return _Part(self, "config", {"error_on_nested_fx_trace": True})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules
            raise AttributeError(f"module '{_FULL_NAME}' has no attribute '{name}'")
        _load(self)
        return getattr(self, name)


class _Part:
    """A module of the package, which loads with it.

    Args:
        package: The package.
        name: Of the module.
        known: What it has that is known before.
    """

    def __init__(self, package: ModuleType, name: str, known: dict[str, Any]) -> None:
        self.__dict__.update(_package=package, _name=name, _known=known)

    def _loaded(self) -> Any:
        _load(self._package)
        return self._package.__dict__[self._name]

    def __getattr__(self, name: str) -> Any:
        if type(self._package) is _Unloaded and name in self._known:
            return self._known[name]
        return getattr(self._loaded(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loaded(), name, value)


class _Parts(MetaPathFinder):
    """Loads the package before one of its modules is imported, as an import does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_FULL_NAME}."):
            return None
        _load(sys.modules[_FULL_NAME])
        loaded = sys.modules.get(fullname)
        if loaded is None:
            return importlib.util.find_spec(fullname)
        return ModuleSpec(fullname, _Loaded(loaded))


class _Loaded(Loader):
    """Gives an import the module that its package has loaded meanwhile.

    Args:
        module: That one.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _load(module: ModuleType) -> None:
    """Load it in place, so that everybody who has it has it whole; nothing where it is loaded."""
    with _lock:
        if not isinstance(module, _Unloaded):
            return
        module.before()
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Parts)]
        named = module.__dict__.pop("named")
        del module.__dict__["before"]
        module.__class__ = ModuleType
        importlib.reload(module)
        for function, untraced in named:
            if function.__dict__.get(_KEPT) is untraced:  # it is named to the compiler at its next call
                del function.__dict__[_KEPT]
