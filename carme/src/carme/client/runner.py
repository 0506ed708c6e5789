"""Runs inside of a job: calls the function that came with it, and leaves what it returned or raised.

It is sent with each job and runs in the job's own Python, so it needs nothing but the standard library.
"""

import os
import sys

# ruff: noqa: E402, PTH100
# Modules of the user's, in the working folder or by PYTHONPATH, are for the function: none of them is taken
# for one of the standard library that is needed here.
_path = sys.path[:]
_given = {os.path.abspath(folder) for folder in ["", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]}
sys.path.sort(key=lambda folder: os.path.abspath(folder) in _given)

import base64
import importlib.util
import json
import pickle
import traceback
import types
import typing
from pathlib import Path

sys.path[:] = _path


def main() -> int:
    """Call the function; the exit code is 1 if it raised."""
    folder = Path(os.environ["CARME_JOB_FOLDER"])
    order = json.loads((folder / "files/function.json").read_text(encoding="utf-8"))
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if here != order["python"]:
        message = (
            f"The function was sent from Python {order['python']}, and the job runs {here}; functions travel "
            "between the same versions only. Choose an image with that version, or submit a script."
        )
        return _write_result(folder, error=message)
    pickler = _cloudpickle(folder / "files/cloudpickle.py")
    try:
        packed = _packed(order, int(os.environ.get("SLURM_ARRAY_TASK_ID", "0")))
    except OSError as error:
        message = f"{order['input']}, in which function and arguments lay, cannot be read: {error.strerror}."
        return _write_result(folder, error=f"{message} Submit the job anew.")
    try:
        function, (arguments, named) = map(pickle.loads, packed)
        value = pickler.dumps(function(*arguments, **named))
    except BaseException as error:
        traceback.print_exc()
        try:
            raised = pickler.dumps(error)
        except Exception:
            raised = None
        return _write_result(folder, error=traceback.format_exc(), raised=raised)
    return _write_result(folder, value=value)


def _packed(order: "dict[str, typing.Any]", task: int) -> "tuple[bytes, bytes]":
    """The function and the arguments of this task; those of a single call belong to any task."""
    if "calls" in order:
        calls = order["calls"]
        texts = order["function"], calls[task if len(calls) > 1 else 0]
        return base64.b64decode(texts[0]), base64.b64decode(texts[1])
    ends = order["ends"]
    which = 1 + (task if len(ends) > 2 else 0)
    with Path(order["input"]).open("rb") as file:
        function = file.read(ends[0])
        file.seek(ends[which - 1])
        return function, file.read(ends[which] - ends[which - 1])


def _cloudpickle(path: Path) -> types.ModuleType:
    """The job's own cloudpickle, else the one that was sent."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        parent = types.ModuleType("cloudpickle")
        parent.__path__ = []
        spec = importlib.util.spec_from_file_location("cloudpickle.cloudpickle", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["cloudpickle"], sys.modules["cloudpickle.cloudpickle"] = parent, module
        spec.loader.exec_module(module)
        return module


def _write_result(folder: Path, value: bytes = b"", error: str = "", raised: "bytes | None" = None) -> int:
    """Write the result, whole or not at all."""
    text = json.dumps(
        {
            "value": base64.b64encode(value).decode(),
            "error": error,
            "raised": base64.b64encode(raised).decode() if raised else "",
        }
    )
    partial = folder / "result.partial"
    partial.write_text(text, encoding="ascii")
    partial.replace(folder / "result")
    if error:
        print(error.strip().splitlines()[-1], file=sys.stderr)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
