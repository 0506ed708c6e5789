"""All the code of a start in one file, made when an image is built.

A start imports several hundred modules, and inside a container each of them costs a dozen questions to a file
system in user space. One file is read at once, also from a cold disk.
"""

import importlib.util
import marshal
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

#: Where an image keeps it.
FILE = Path(sys.prefix, "share/carme/singleuser.code")


def use(file: Path = FILE) -> bool:
    """Take modules from the bundle from now on; False where there is none that fits what is installed."""
    try:
        with file.open("rb") as stream:
            built_for, modules = marshal.load(stream)
    except (OSError, ValueError, EOFError, TypeError):
        return False
    if built_for != installed():
        return False
    sys.meta_path.insert(0, _Bundled(modules))  # pyright: ignore[reportArgumentType]
    return True


def installed() -> tuple[Any, ...]:
    """Changes whenever a package is added, removed or replaced: each has a folder with its version there."""
    folders = [entry for entry in sys.path if entry.endswith(("-packages", "lib-dynload"))]
    return (
        importlib.util.MAGIC_NUMBER,
        *((entry, int(Path(entry).stat().st_mtime)) for entry in folders if Path(entry).is_dir()),
    )


def write(file: Path = FILE) -> int:
    """Bundle the modules that are imported now; returns their number."""
    modules: dict[str, tuple[str, bool, bytes]] = {}
    for name, module in sorted(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or type(spec.loader) is not SourceFileLoader or spec.name != name or not spec.origin:
            continue
        code = spec.loader.get_code(name)
        if code is not None:
            modules[name] = (spec.origin, spec.submodule_search_locations is not None, marshal.dumps(code))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(marshal.dumps((installed(), modules)))
    return len(modules)


class _Bundled:
    """Finds the modules of a bundle."""

    def __init__(self, modules: dict[str, tuple[str, bool, bytes]]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        found = self.modules.get(name)
        if found is None:
            return None
        origin, package, _ = found
        folder = [os.path.dirname(origin)] if package else None  # noqa: PTH120  this is a start's hot path
        loader = _Loader(name, origin, self.modules)
        return spec_from_file_location(name, origin, loader=loader, submodule_search_locations=folder)


class _Loader(SourceFileLoader):
    """A module's own loader in all but where its code comes from."""

    def __init__(self, name: str, origin: str, modules: dict[str, tuple[str, bool, bytes]]) -> None:
        super().__init__(name, origin)
        self.modules = modules

    def get_code(self, fullname: str) -> CodeType | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = self.modules.get(fullname)
        return marshal.loads(found[2]) if found else super().get_code(fullname)
