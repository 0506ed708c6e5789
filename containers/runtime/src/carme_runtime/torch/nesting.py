"""The end of a backward pass that has others inside.

A checkpoint with `use_reentrant=True` computes its segment again in the middle of a backward pass, and calls
`backward` for it. PyTorch's engine calls what it is given then when the segment ends, so that each one would
count as a pass. Therefore the first `backward` inside of another one notes the end of the outer one.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from carme_runtime.collectives.errors import InvalidCall

__all__ = ["call_at_end", "inner_step", "is_nested", "watch_nesting"]

_RUN = "_engine_run_backward"  # by which all of PyTorch's calls in Python enter the engine


class _Ending:
    """What is called when an outermost pass ends; the engine holds it as long as that pass runs."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def __call__(self) -> None:
        for call in self.calls:
            call()


class _Nesting(threading.local):
    """Of the outermost pass in which this thread's passes run; None: they are outermost themselves."""

    ending: _Ending | None = None


_nesting = _Nesting()
_endings: "weakref.WeakValueDictionary[int, _Ending]" = weakref.WeakValueDictionary()  # by the engine's tasks


def watch_nesting() -> None:
    """From now on `call_at_end` knows passes inside of others, by whatever they begin."""
    original: Any = getattr(torch.autograd, _RUN)
    if getattr(original, "knows_nesting", False):
        return

    @functools.wraps(original)
    def run(*arguments: Any, **keywords: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return original(*arguments, **keywords)
        with _inside():
            return original(*arguments, **keywords)

    run.knows_nesting = True  # pyright: ignore[reportFunctionMemberAccess]
    for module in (torch.autograd, torch.autograd.graph):
        setattr(module, _RUN, run)


def call_at_end(call: Callable[[], Any]) -> None:
    """Call it when the backward pass that runs ends, or the outermost one that this is inside of."""
    if _nesting.ending is None:
        torch.autograd.Variable._execution_engine.queue_callback(call)  # pyright: ignore
    else:
        _nesting.ending.calls.append(call)


def is_nested() -> bool:
    """Whether the pass that runs is inside of another one."""
    return _nesting.ending is not None


def inner_step() -> InvalidCall:
    """The error for a step with gradients of a pass inside of another one, which are not reduced yet."""
    return InvalidCall(
        "optimizer.step() was called inside of a backward pass, and its gradients are not reduced before "
        "that pass ends.",
        "Call it behind the outermost backward(), or do not give this model and optimizer to parallelize.",
    )


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    """A pass begins inside of another one, which runs now."""
    if _nesting.ending is not None:  # inside of one that is inside itself
        yield
        return
    task = torch._C._current_graph_task_id()
    ending = _endings.get(task)
    if ending is None:
        ending = _endings[task] = _Ending()
        torch.autograd.Variable._execution_engine.queue_callback(ending)  # pyright: ignore
    _nesting.ending = ending
    del ending  # an error's traceback must not hold it, by which it is seen that the pass is over
    try:
        yield
    finally:
        _nesting.ending = None
