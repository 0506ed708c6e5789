"""What a session's server need not import, although the packages that it is made of do.

JupyterHub's extension for single-user servers imports a good part of the hub with it (its database, pages),
and `jsonschema` compiles a grammar for a format that no schema here uses. Together they were most of a start.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from carme_spawner.singleuser import bundle

#: Modules that only a hub runs. While `prepare` imports, stand-ins take their place.
HUB_ONLY = (
    "alembic",
    "jupyterhub.handlers",
    "jupyterhub.metrics",
    "jupyterhub.orm",
    "jupyterhub.roles",
    "sqlalchemy",
)
#: JupyterHub's client, which brings aiohttp with it, until it is first used.
CLIENT = "jupyterhub.httpclient"
#: `jsonschema` does without checking the formats that these are for.
UNNEEDED = ("isoduration", "rfc3986_validator", "rfc3987_syntax")
#: Imported when they are first used.
LATER = ("aiohttp", "httpx", "requests")


def prepare() -> None:
    """Import what the server is made of."""
    bundle.use()
    with _stand_in_modules():
        import jupyterhub.singleuser.extension  # noqa: F401
        import jupyterlab.labapp  # noqa: F401


class _Attributes(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class Absent(Exception, metaclass=_Attributes):
    """Anything that a hub-only module could hold: a class, an exception, a decorator, a function."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__()

    def __call__(self, decorated: Any = None) -> Any:
        return decorated


async def fetch(url: str, **options: Any) -> Any:
    """JupyterHub's own function of this name, found when it is needed."""
    from jupyterhub.httpclient import fetch

    return await fetch(url, **options)


class _StandIns:
    """Finds the hub-only modules; each holds `Absent` under every name, the client the real `fetch`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if _is_replaced(name) else None  # pyright: ignore

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        if module.__name__ == CLIENT:
            module.fetch = fetch  # pyright: ignore[reportAttributeAccessIssue]
        module.__getattr__ = _absent  # pyright: ignore[reportAttributeAccessIssue]


class _Later:
    """Finds modules by the finders that come after it, and has them run at their first use."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in LATER:
            return None
        for finder in sys.meta_path:
            if finder is self or isinstance(finder, _StandIns):
                continue
            spec = finder.find_spec(name, path, target)
            if spec and spec.loader:
                spec.loader = importlib.util.LazyLoader(spec.loader)
                return spec
        return None


def _absent(name: str) -> type[Absent]:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent


def _is_replaced(name: str) -> bool:
    return name in (*HUB_ONLY, CLIENT) or name.startswith(tuple(f"{each}." for each in HUB_ONLY))


@contextmanager
def _stand_in_modules() -> Iterator[None]:
    finder = _StandIns()
    unneeded = [name for name in UNNEEDED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(unneeded))  # pyright: ignore  None: the import fails
    sys.meta_path[:0] = [finder, _Later()]  # pyright: ignore
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # pyright: ignore
        for name in unneeded:
            del sys.modules[name]
        for name in [name for name in sys.modules if _is_replaced(name)]:
            if isinstance(getattr(sys.modules[name], "__loader__", None), _StandIns):
                parent, _, child = name.rpartition(".")
                if parent in sys.modules:
                    vars(sys.modules[parent]).pop(child, None)
                del sys.modules[name]
