"""`carme onnx`, which is `carme-run onnx` and `python -m carme_runtime.onnx`, too; and `carme-run --onnx`."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from carme_runtime import profile
from carme_runtime.onnx.errors import OnnxError
from carme_runtime.onnx.examples import check_inputs, example_of
from carme_runtime.onnx.library import library
from carme_runtime.onnx.loading import Model, load
from carme_runtime.onnx.plans import plan
from carme_runtime.onnx.running import Runner, joined, micro_batches
from carme_runtime.onnx.tracing import trace
from carme_runtime.subcommands import add_subcommand, exit_code
from carme_runtime.traces.launch import Tracing, prepare
from carme_runtime.traces.launch import add_options as add_trace_options


def main(arguments: list[str], program: str = "python -m carme_runtime.onnx") -> int:
    """Run one command; 0: done, 1: it cannot be done."""
    options = parser(program).parse_args(arguments)
    return exit_code(program, lambda: options.run(options))


def parser(program: str = "carme onnx") -> argparse.ArgumentParser:
    """Of the options."""
    parser = argparse.ArgumentParser(prog=program, description="ONNX models on several workers: plan, run.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], None], words: str) -> argparse.ArgumentParser:
        command = add_subcommand(commands, name, run, words)
        _add_common(command)
        return command

    planning = add("plan", _plan, "show the tasks that a model becomes, what travels, and the predicted time")
    planning.add_argument("--input", type=Path, metavar="X.npz", help="example inputs of the model")
    planning.add_argument(
        "--shape",
        action="append",
        default=[],
        type=_shape,
        metavar="NAME=1,3,224,224",
        help="shape of an input whose dimensions the model leaves open, where there is no example",
    )
    planning.add_argument(
        "--micro-batches",
        type=_count,
        default=1,
        metavar="M",
        help="number of micro-batches that follow each other (default: 1)",
    )
    planning.add_argument(
        "--estimate", action="store_true", help="take times from sizes instead of measuring each operator"
    )
    planning.add_argument("--svg", type=Path, metavar="FILE", help="also draw the graph with its cuts")
    running = add("run", _run, "run a model on several workers")
    running.add_argument(
        "--input", type=Path, required=True, metavar="X.npz", help="the inputs: an array for each"
    )
    running.add_argument(
        "--output", type=Path, required=True, metavar="Y.npz", help="the file to write the outputs to"
    )
    add_trace_options(running)
    running.add_argument(
        "--memory", metavar="SIZE", help="memory that tensors in flight may take, such as 8GiB"
    )
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", type=Path, metavar="MODEL.onnx")
    command.add_argument(
        "--workers",
        default="",
        metavar="N",
        help="a number, kinds such as cpu:2,gpu:1, job: all processors of its nodes, or job:4: so many on "
        "each of them (default: one per processor of this node)",
    )
    command.add_argument(
        "--tasks",
        type=_count,
        metavar="T",
        help="number of tasks to cut the model into (default: the fastest plan's)",
    )


def _workers(options: argparse.Namespace) -> str:
    return options.workers or f"cpu:{len(os.sched_getaffinity(0))}"


def _plan(options: argparse.Namespace) -> None:
    model = load(options.model)
    if options.input:
        batches = micro_batches(model, _read(model, options.input), _workers(options))
        example = batches[0]
    else:
        example = example_of(model, dict(options.shape))
    graph = trace(model, example, measure=not options.estimate)
    workers, count = _workers(options), options.micro_batches
    found = plan(graph, workers, tasks=options.tasks, micro_batches=count, model=model)
    if options.svg:
        try:
            options.svg.write_text(found.drawing())
        except OSError as error:
            raise OnnxError(
                f"{options.svg} cannot be written: {error.strerror}.", "Name another file."
            ) from None
    print(found.to_json() if options.json else f"{model.name}: {found}", end="\n" if options.json else "")


def _run(options: argparse.Namespace) -> None:
    model = load(options.model)
    if options.output.suffix != ".npz":
        raise OnnxError(
            f"{options.output} is not a valid name of an .npz file.", "Name the output like results.npz."
        )
    if not options.output.absolute().parent.is_dir():
        raise OnnxError(f"There is no folder {options.output.absolute().parent}.", "Make it first.")
    batches = micro_batches(model, _read(model, options.input), _workers(options))
    runner = Runner(model, _workers(options), tasks=options.tasks, memory=options.memory)
    tracing = prepare(options, ranks=1)  # makes a folder, so all that may be refused comes before
    began = time.perf_counter()
    with _ending(), _traced(tracing):
        results = joined(model, batches, runner.run(batches))
    seconds = time.perf_counter() - began
    _write(options.output, results)
    for notice in runner.notices:
        print(notice, file=sys.stderr)
    tasks = len(runner.plan.tasks) if runner.plan else 0
    if options.json:
        numbers = {"micro_batches": len(batches), "tasks": tasks, "seconds": round(seconds, 3)}
        shapes = {name: list(array.shape) for name, array in results.items()}
        print(json.dumps({**numbers, "outputs": shapes, "notices": runner.notices}, indent=1))
        return
    outputs = ", ".join(f"{name} {list(array.shape)}" for name, array in results.items())
    print(
        f"{model.name}: {len(batches)} micro-batch{'es' * (len(batches) != 1)} through {tasks} "
        f"task{'s' * (tasks != 1)} in {seconds:.2f} s. {options.output} has {outputs}."
    )


@contextlib.contextmanager
def _traced(tracing: Tracing | None) -> Iterator[None]:
    """Record the run, and make of it what was requested, however it ends."""
    if tracing is None:
        yield
        return
    before, begun = profile.recorder, False
    try:
        with _variables(tracing.variables()):  # what runs later is not of this trace
            profile.recorder = None  # in a job there is one already, which adds up and records nothing
            profile.begin()
        begun = True
        yield
    finally:
        recorder, profile.recorder = profile.recorder, before
        if begun:
            if recorder:
                recorder.write()
            tracing.finish()
        else:
            shutil.rmtree(tracing.folder, ignore_errors=True)


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment, and afterwards what was there before."""
    before = {name: os.environ.get(name) for name in values}
    try:
        os.environ.update(values)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Let SIGTERM, which a job gets at its time limit, end the program as an error does: nothing is left."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield  # somebody else decides what it does
        return

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # another one must not end what is left to do
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _read(model: Model, path: Path) -> dict[str, Any]:
    """The arrays of a file by input. Raises OnnxError."""
    numpy = library("numpy")
    try:
        found = numpy.load(path, allow_pickle=False)
        arrays = dict(found.items()) if hasattr(found, "items") else {"arr_0": found}
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "it is not a file of NumPy arrays without objects"
        raise OnnxError(
            f"{path} cannot be read: {reason}.", "Write it with numpy.savez(file, input_name=array)."
        ) from None
    if list(arrays) == ["arr_0"] and len(model.inputs) == 1:
        arrays = {model.inputs[0].name: arrays["arr_0"]}
    return check_inputs(model, arrays, batch=True)


def _write(path: Path, results: dict[str, Any]) -> None:
    """Write all of it or nothing. Raises OnnxError."""
    numpy = library("numpy")
    draft = path.with_name(f".{path.name}.{os.getpid()}.npz")
    try:
        numpy.savez(draft, **results)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OnnxError(
            f"{path} cannot be written: {error.strerror}.", "Free some space, or name another file."
        ) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of 1 or more.")
    return int(text)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, sizes = text.rpartition("=")
    parts = [part for part in sizes.split(",") if part]
    if not name or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a shape. Write the input and its sizes: x=1,3,224,224"
        )
    return name, tuple(map(int, parts))
