"""Changes modules of other packages when a script imports them, and what Python runs before the script."""

import importlib.machinery
import os
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_FIRST = Path(__file__).parent / "at_start"  # Python runs the module in it before the script


def first_in_path(path: str | None) -> str:
    """The PYTHONPATH of ranks with which our own module runs before a script.

    Args:
        path: The PYTHONPATH that they would have.
    """
    return os.pathsep.join([str(_FIRST), *([path] if path else [])])


def changed_spec(
    name: str, path: Sequence[str] | None, change: Callable[[ModuleType], None]
) -> ModuleSpec | None:
    """What a finder gives for a module that `change` is called with as soon as it has been imported."""
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is not None and isinstance(loader := spec.loader, importlib.machinery.SourceFileLoader):
        execute = loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        loader.exec_module = execute_and_change
    return spec
