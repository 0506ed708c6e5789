"""What all unit tests share."""

import functools
import gc
import os
import signal
import sys
import types
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from pydantic import BaseModel

# The same examples in each run, so that none fails by luck, and no limit of time: a busy machine exceeds any.
# For new examples: --hypothesis-profile default
hypothesis.settings.register_profile(
    "same everywhere",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same everywhere")

# A shell that starts the tests in its background lets them ignore interrupts; asyncio would undo that midway.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_before = pytest.StashKey[dict[str, Any]]()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while modules and tests are loaded, and never again among them.

    They stay until the end, and that search took a third of the time in which they are loaded.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Note the state that the test and its fixtures find."""
    item.stash[_before] = _shared(item)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A test may not change what the next one finds: then both would depend on their order.

    That is the environment, the folder, signals, and the tables of the test's module and of those that it
    imports from. Who needs a change takes `monkeypatch`, or a copy.
    """
    yield
    before, after = item.stash[_before], _shared(item)
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed:
        pytest.fail(f"The test has changed what others use: {', '.join(changed)}", pytrace=False)


def _shared(item: pytest.Item) -> dict[str, Any]:
    # pytest says there which test runs, and a module's browser what Django may do meanwhile.
    ignored = ("PYTEST_CURRENT_TEST", "DJANGO_ALLOW_ASYNC_UNSAFE")
    environment = {f"${name}": value for name, value in os.environ.items() if name not in ignored}
    umask = os.umask(0o077)
    os.umask(umask)
    found = {
        **environment,
        "the folder": Path.cwd(),
        "the umask": umask,
        "the search path": list(sys.path),
        **{f"the handler of {number.name}": signal.getsignal(number) for number in _SIGNALS},
    }
    module = getattr(item, "module", None)
    numpy = sys.modules.get("numpy")
    # NumPy would take milliseconds for the digits of each array in a table.
    with numpy.printoptions(override_repr=_sum_of_array) if numpy else nullcontext():
        for each in _modules_of(module) if isinstance(module, types.ModuleType) else ():
            for name, value in vars(each).items():
                # pytest-django names the tests' database there, from its first test to the last.
                if name != "DATABASES" and (each is module or name.isupper()) and _is_table(name, value):
                    found[f"{each.__name__}.{name}"] = repr(value)
    return found


def _sum_of_array(array: Any) -> str:
    """What changes with an array of NumPy: its type, its shape or a value."""
    values = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    return f"{array.dtype} {array.shape} {zlib.crc32(values)}"


@functools.cache
def _modules_of(module: types.ModuleType) -> tuple[types.ModuleType, ...]:
    """The module, and the modules of Carme that it imports from."""
    names = {getattr(value, "__module__", None) for value in vars(module).values()}
    imported = {value.__name__ for value in vars(module).values() if isinstance(value, types.ModuleType)}
    own_modules = {name for name in names | imported if isinstance(name, str) and name.startswith("carme")}
    return module, *(sys.modules[name] for name in sorted(own_modules) if name in sys.modules)


def _is_table(name: str, value: object) -> bool:
    """Whether it holds values; classes and functions are changed by `monkeypatch` only."""
    if name.startswith("__") or isinstance(value, type):
        return False
    return isinstance(value, dict | list | set | bytearray | BaseModel) or is_dataclass(value)
