"""A compiler that is large, like PyTorch's, and what stands for it until a program uses it."""

import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG

from .conftest import clean_environment

PACKAGE = """
import importlib

def __getattr__(name):
    if name == "_dynamo":
        return importlib.import_module("torch._dynamo")
    raise AttributeError(name)
"""
COMPILER = """
import sys, time
import torch
if getattr(torch, "is_broken", False):
    raise ImportError("broken")
if getattr(torch, "is_slow", False):
    time.sleep(0.3)
from . import config
assert torch._dynamo.config is config

def disable(fn, *args, **kwargs):
    return ("disabled", fn)
"""
BEGIN = """
import sys, threading, types
import torch
from carme_runtime.out_of_core import late_compiler

calls = []
late_compiler.load_late(lambda: calls.append("before"))
import torch._dynamo

def loaded():
    assert type(torch._dynamo) is types.ModuleType and torch._dynamo is sys.modules["torch._dynamo"]
    assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
    assert not [each for each in sys.meta_path if "carme" in type(each).__module__]
    return True

def function():
    return 1
"""


def run(tmp_path: Path, program: str) -> None:
    compiler = tmp_path / "torch" / "_dynamo"
    compiler.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text(PACKAGE)
    (compiler / "__init__.py").write_text(COMPILER)
    (compiler / "config.py").write_text("verbose = False\n")
    (compiler / "rarely_used.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        env=clean_environment(PYTHONPATH=f"{tmp_path}:{clean_environment()['PYTHONPATH']}"),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_pytorch_does_in_each_step_does_not_load_it(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
torch._dynamo.graph_break()
assert torch._dynamo.disable(function, True, wrapping=False) is function
assert torch._dynamo.config.error_on_nested_fx_trace is True
torch._dynamo.trace_rules.clear_lru_cache()
assert not hasattr(torch._dynamo, "__wrapped__")  # what walks through all modules
assert not calls and "torch._dynamo.config" not in sys.modules
""",
    )


@pytest.mark.parametrize(
    "use",
    [
        "import torch._dynamo.config as module; assert module is torch._dynamo.config",
        "import torch._dynamo.rarely_used as module; assert module is torch._dynamo.rarely_used",
        "from torch._dynamo import config; assert config.verbose is False",
        "torch._dynamo.config.verbose = True; assert sys.modules['torch._dynamo.config'].verbose",
        "torch._dynamo.level = 1; assert torch._dynamo.level == 1",
        "assert torch._dynamo.disable(function) == ('disabled', function)",
    ],
)
def test_any_other_use_loads_it_whole(tmp_path: Path, use: str) -> None:
    run(tmp_path, f"{use}\nassert loaded() and calls == ['before']")


def test_modules_of_it_are_as_an_import_leaves_them(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
import torch._dynamo.config as config
assert config.__spec__.name == "torch._dynamo.config" and config.__spec__.loader is config.__loader__
try:
    import torch._dynamo.missing
except ModuleNotFoundError:
    pass
else:
    raise AssertionError
""",
    )


def test_functions_are_named_to_it_when_it_is_loaded(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
early = torch._dynamo
function.__dynamo_disable = early.disable(function, True, wrapping=False)  # as torch._disable_dynamo does
assert torch._dynamo.config.verbose is False
assert not hasattr(function, "__dynamo_disable")
assert early.disable(function, True, wrapping=False) == ("disabled", function)
assert early.config.verbose is False
""",
    )


def test_a_load_that_fails_can_be_tried_again(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
torch.is_broken = True
for _ in range(2):
    try:
        torch._dynamo.config.verbose
    except ImportError as error:
        assert str(error) == "broken"
    else:
        raise AssertionError
torch.is_broken = False
import torch._dynamo
assert loaded()
""",
    )


def test_threads_load_it_once_and_see_it_whole(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
torch.is_slow = True
early, failures, begin = torch._dynamo, [], threading.Barrier(8)

def use(number):
    begin.wait()
    try:
        if number % 2:
            assert early.config.verbose is False
        assert early.disable(function) == ("disabled", function)
    except BaseException as error:
        failures.append(error)

threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
assert not failures, failures
assert loaded()
""",
    )


def test_a_function_that_is_named_while_another_thread_loads_it_is_named_again(tmp_path: Path) -> None:
    """The other thread begins to load it when the first one has seen that it is not loaded."""
    run(
        tmp_path,
        """
import weakref

early, failures = torch._dynamo, []
naming, go = threading.Event(), threading.Event()

class Names(weakref.WeakSet):
    def add(self, item):
        naming.set()
        go.wait()
        super().add(item)

class Lock:
    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        if not self.lock.acquire(blocking=False):
            go.set()  # the other thread waits until the function is named
            self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()

late_compiler._named, late_compiler._lock = Names(), Lock(late_compiler._lock)

def load():
    naming.wait()
    try:
        assert early.config.verbose is False
    except BaseException as error:
        failures.append(error)
    go.set()

thread = threading.Thread(target=load)
thread.start()
assert early.disable(function, True, wrapping=False) is function
thread.join()
assert loaded() and not failures, failures
assert not list(late_compiler._named)
""",
    )


def test_it_stays_where_it_is_loaded_already(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
torch._dynamo.config.verbose
real = torch._dynamo
late_compiler.load_late(lambda: calls.append("again"))
assert torch._dynamo is real and loaded() and calls == ["before"]
""",
    )
