"""Models run as Petri nets give what ONNX Runtime gives for the whole model, whatever is killed meanwhile."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import carme_runtime
import carme_runtime.onnx as carme_onnx
import onnx_models
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.onnx import OnnxError, Runner, execution, folding, slots
from carme_runtime.onnx.execution import Pipeline, TaskBody
from carme_runtime.onnx.slots import EACH, Bound
from carme_runtime.petri import PetriError, store
from carme_runtime.petri.run import Run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].shape == array.shape and found[name].dtype == array.dtype
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_fused_tasks_give_what_the_whole_model_gives(workers: int):
    proto, x = onnx_models.branches(), onnx_models.random(3, 3, 64, 64)
    wanted = onnx_models.expected(proto, {"x": x})
    check(carme_onnx.run(proto, {"x": x}, workers=workers, tasks=workers), wanted)
    check(carme_onnx.run(proto, {"x": x}, workers=workers), wanted)


def test_a_batch_is_split_into_micro_batches_of_the_size_that_the_model_takes():
    proto = onnx_models.branches(batch=1)
    x = onnx_models.random(5, 3, 64, 64)
    found = carme_onnx.run(proto, {"x": x}, workers=2, tasks=3)
    for k in range(5):
        wanted = onnx_models.expected(proto, {"x": x[k : k + 1]})
        check({name: array[k : k + 1] for name, array in found.items()}, wanted)


def test_a_batch_whose_samples_depend_on_each_other_is_not_split():
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    proto, x = onnx_models.model(nodes, {"x": ("N", 8)}, ["y"]), onnx_models.random(6, 8)
    check(carme_onnx.run(proto, {"x": x}, workers=2), onnx_models.expected(proto, {"x": x}))


def with_large_constants() -> Any:
    """A chain whose fourth of five steps adds what depends on constants alone, and takes long to make."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("Relu", ["m"], ["r"], name="first"),
        helper.make_node("ConstantOfShape", ["shape"], ["c0"], name="zeros"),
        *(helper.make_node("Exp", [f"c{k}"], [f"c{k + 1}"], name=f"exp{k}") for k in range(3)),
        helper.make_node("Add", ["r", "c3"], ["a"], name="sum"),
        helper.make_node("Relu", ["a"], ["s"], name="second"),
        helper.make_node("Neg", ["s"], ["y"], name="negative"),
    ]
    tensors = [
        onnx_models.weights("w", 64, 640),
        numpy_helper.from_array(np.array([640, 640]), "shape"),
    ]
    return onnx_models.model(nodes, {"x": (640, 64)}, ["y"], tensors)


@pytest.mark.parametrize(
    ("workers", "tasks", "batches"), [(2, 3, 20), (4, None, 1), (4, None, 20), (1, 5, 2)]
)
def test_no_task_is_of_constants_alone(
    workers: int, tasks: int | None, batches: int, monkeypatch: pytest.MonkeyPatch
):
    """Nothing would start such a task; here constants take the most time, and are too large to fold."""
    monkeypatch.setattr(folding, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(folding, "_LEAST_BYTES", 1 << 20)
    proto = with_large_constants()
    given = [{"x": onnx_models.random(640, 64, seed=k)} for k in range(batches)]
    model = carme_onnx.load(proto)
    assert len(model.nodes) == 9
    for found, each in zip(Runner(model, workers, tasks=tasks).run(given), given, strict=True):
        check(found, onnx_models.expected(proto, each))
    with pytest.raises(OnnxError, match=r"5 operators that depend on its inputs\..* 5 at most"):
        Runner(model, workers, tasks=9).run(given)


def test_inputs_of_different_shapes_follow_each_other():
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Transpose", ["r"], ["y"], perm=[1, 0])]
    proto = onnx_models.model(nodes, {"x": ("N", "W")}, ["y"])
    given = [{"x": onnx_models.random(k + 1, 2000 + k, seed=k)} for k in range(6)]
    found = carme_onnx.run(proto, [*given, *given], workers=2, tasks=2)
    for inputs, outputs in zip([*given, *given], found, strict=True):
        check(outputs, onnx_models.expected(proto, inputs))


def test_a_task_may_free_an_input_as_soon_as_its_token_is_there(monkeypatch: pytest.MonkeyPatch):
    put = Run.put

    def put_and_wait(run: Run, *given: Any) -> None:
        put(run, *given)
        run.wait()  # the task has run before the program goes on

    monkeypatch.setattr(Run, "put", put_and_wait)
    proto, x = onnx_models.chain(2), onnx_models.random(64, 64)
    check(carme_onnx.run(proto, {"x": x}, workers=1), onnx_models.expected(proto, {"x": x}))


def test_a_value_that_several_tasks_use_may_have_another_shape_with_each_input():
    """Inputs of one shape: only their numbers say how many positions NonZero finds."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Cast", ["places"], ["y"], to=1),
        helper.make_node("Neg", ["places"], ["n"]),
        helper.make_node("Cast", ["n"], ["z"], to=1),
    ]
    proto = onnx_models.model(nodes, {"x": (64, 64)}, ["y", "z"])
    given = [{"x": np.zeros((64, 64), np.float32)} for _ in range(4)]
    for k, each in enumerate(given):
        each["x"].reshape(-1)[: 2000 + 500 * k] = 1
    found = carme_onnx.run(proto, given, workers=1, tasks=4)
    for inputs, outputs in zip(given, found, strict=True):
        check(outputs, onnx_models.expected(proto, inputs))


def test_samples_that_are_equal_do_not_prove_that_others_are_independent():
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    proto, x = onnx_models.model(nodes, {"x": ("N", 8)}, ["y"]), onnx_models.random(6, 8)
    x[1] = x[0]
    check(carme_onnx.run(proto, {"x": x}, workers=2), onnx_models.expected(proto, {"x": x}))


@pytest.mark.parametrize("keepdims", [0, 1])
def test_outputs_without_samples_are_not_joined(keepdims: int):
    nodes = [helper.make_node("ReduceMean", ["x"], ["y"], axes=[0, 1][: 2 - keepdims], keepdims=keepdims)]
    proto = onnx_models.model(nodes, {"x": (2, 8)}, ["y"])
    with pytest.raises(OnnxError, match=r"Output y of The model has the shape .* cannot be joined"):
        carme_onnx.run(proto, {"x": onnx_models.random(6, 8)}, workers=1)


def test_bodies_of_an_if_are_part_of_one_task():
    proto = onnx_models.choice()
    for x in (np.ones((2, 4), np.float32), np.full((2, 4), 0.01, np.float32)):
        check(carme_onnx.run(proto, {"x": x}, workers=2, tasks=4), onnx_models.expected(proto, {"x": x}))


def test_a_killed_worker_changes_nothing_but_the_time(tmp_path: Path):
    proto = onnx_models.branches(batch=1, size=96)
    given = [{"x": onnx_models.random(1, 3, 96, 96, seed=k)} for k in range(12)]
    killed = []

    def kill(run: Any, number: int) -> None:
        if number in (4, 8):
            # One that lives: the run may not know yet that the first one has ended.
            killed.append(next(each for each in run.workers if each not in killed))
            os.kill(killed[-1], signal.SIGKILL)

    model = carme_onnx.load(proto)
    runner = Runner(model, 2, tasks=3, watch=kill, folder=tmp_path / "kept")
    found = runner.run(given)
    assert len(killed) == 2
    for inputs, outputs in zip(given, found, strict=True):
        check(outputs, onnx_models.expected(proto, inputs))


def test_micro_batches_use_the_same_memory_one_after_the_other(shared: Path):
    """However many there are: results leave the net while it runs."""
    proto = onnx_models.branches(batch=1, size=96)
    given = [{"x": onnx_models.random(1, 3, 96, 96, seed=k)} for k in range(40)]
    ranges: list[dict[str, int]] = []
    runner = Runner(
        carme_onnx.load(proto), 2, tasks=2, watch=lambda run, _: ranges.append(run.status()["ranges"])
    )
    for inputs, outputs in zip(given, runner.run(given), strict=True):
        check(outputs, onnx_models.expected(proto, inputs))
    count, names = 2 * EACH, {name for each in ranges for name in each}
    values = {name.split("-", 1)[1] for name in names if name.startswith("slot")}
    assert len(values) >= 3  # the input, what travels, and what is given
    assert {name.split("-", 1)[0] for name in names} >= {f"slot{k}" for k in range(count)}
    # Besides them there is what each worker made when it saw the model for the first time.
    assert len(ranges[-1]) <= count * len(values) + 2 * len(values)


def test_results_in_a_slot_are_taken_before_the_next_micro_batch_comes(monkeypatch: pytest.MonkeyPatch):
    """One worker is slower than the others, which must not write over what it reads and gives."""
    run_session, slow = Bound.run, []

    def run_slowly(self: Bound) -> bool:
        found = run_session(self)
        if not slow:
            with contextlib.suppress(FileExistsError):
                Path("slow").touch(exist_ok=False)
                slow.append(True)
        time.sleep(0.02 if slow else 0)
        return found

    monkeypatch.setattr(Bound, "run", run_slowly)
    proto = onnx_models.branches(batch=1, size=64)
    given = [{"x": onnx_models.random(1, 3, 64, 64, seed=k)} for k in range(60)]
    for inputs, outputs in zip(given, Runner(carme_onnx.load(proto), 3, tasks=2).run(given), strict=True):
        check(outputs, onnx_models.expected(proto, inputs))


def test_a_killed_worker_leaves_the_memory_of_its_micro_batch_to_the_next(shared: Path):
    proto = onnx_models.branches(batch=1, size=96)
    given = [{"x": onnx_models.random(1, 3, 96, 96, seed=k)} for k in range(60)]
    killed: list[int] = []

    def kill(run: Any, number: int) -> None:
        if number % 10 == 9:
            living = [each for each in run.workers if each not in killed]
            if living:
                killed.append(living[number % len(living)])
                os.kill(killed[-1], signal.SIGKILL)

    found = Runner(carme_onnx.load(proto), 2, tasks=3, watch=kill).run(given)
    assert len(killed) > 1
    for inputs, outputs in zip(given, found, strict=True):
        check(outputs, onnx_models.expected(proto, inputs))


def test_slots_take_at_most_half_of_the_memory_of_a_run(shared: Path, monkeypatch: pytest.MonkeyPatch):
    """They stay until the run ends; without any each tensor is freed when it was used."""
    assert slots.slots_for(8, [1000] * 10, 1 << 30) == 8 * EACH
    assert slots.slots_for(8, [60 << 20] * 10, 16 << 30) == 13, "8 GiB by 600 MiB"
    assert slots.slots_for(8, [60 << 20] * 10, 8 << 30) == 0, "fewer than workers"
    assert slots.slots_for(2, [slots.MOST_BYTES + 1], 1) == 2 * EACH, "too large to be kept anyway"
    monkeypatch.setattr(store, "usual_limit", lambda: 1 << 20)
    proto = onnx_models.branches(batch=1, size=96)
    given = [{"x": onnx_models.random(1, 3, 96, 96, seed=k)} for k in range(8)]
    ranges: list[str] = []
    watch = lambda run, _: ranges.extend(run.status()["ranges"])  # noqa: E731
    found = Runner(carme_onnx.load(proto), 2, tasks=2, watch=watch).run(given)
    assert not any(name.startswith("slot") for name in ranges)
    for inputs, outputs in zip(given, found, strict=True):
        check(outputs, onnx_models.expected(proto, inputs))


def test_a_tensor_too_large_for_a_slot_has_memory_of_its_own(shared: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slots, "MOST_BYTES", 1 << 16)
    proto = onnx_models.branches(batch=1, size=96)
    given = [{"x": onnx_models.random(1, 3, 96, 96, seed=k)} for k in range(8)]
    ranges: list[str] = []
    watch = lambda run, _: ranges.extend(run.status()["ranges"])  # noqa: E731
    found = Runner(carme_onnx.load(proto), 1, tasks=2, watch=watch).run(given)
    assert ranges and not any(name.startswith("slot") for name in ranges)
    for inputs, outputs in zip(given, found, strict=True):
        check(outputs, onnx_models.expected(proto, inputs))


def test_tensors_between_tasks_lie_in_shared_memory(shared: Path):
    """A token has the name of a range; the journal, which has all tokens, stays small."""
    proto, folder = onnx_models.branches(batch=1, size=128), Path("kept")
    given = [{"x": onnx_models.random(1, 3, 128, 128, seed=k)} for k in range(3)]
    runner = Runner(carme_onnx.load(proto), 2, tasks=3, folder=folder)
    runner.run(given)
    assert runner.plan and runner.plan.sent_bytes > 1 << 20
    assert (folder / "run" / "journal").stat().st_size < 1 << 16


_MATRIX = """
import sys
import onnxruntime
from carme_runtime.onnx.sessions import session

def own():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:")) >> 10

before = own()
made = session(sys.argv[1], packed=sys.argv[2] == "packed")
print(own() - before)
"""


def test_large_matrices_are_in_memory_once_whatever_number_of_workers(
    monkeypatch: pytest.MonkeyPatch,
):
    tensors = [onnx_models.weights("w", 4096, 1024), onnx_models.weights("b", 1024)]
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"])]
    proto, folder = onnx_models.model(nodes, {"x": (1, 4096)}, ["y"], tensors), Path("kept")
    monkeypatch.setattr(execution, "_MOST_PACKED", 1 << 20)
    packed: list[bool] = []
    monkeypatch.setattr(execution, "TaskBody", lambda *given: packed.append(given[-1]) or TaskBody(*given))
    x = {"x": onnx_models.random(1, 4096)}
    found = Runner(carme_onnx.load(proto), 1, folder=folder).run([x])
    check(found[0], onnx_models.expected(proto, x))
    assert packed == [False]
    (part,) = folder.glob("*.onnx")
    environment = {**os.environ, "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1])}
    commands = [[sys.executable, "-c", _MATRIX, part, kind] for kind in ("packed", "plain")]
    grown = [int(subprocess.check_output(command, env=environment)) for command in commands]
    assert grown[0] >= 16 > grown[1]  # MiB; the matrix has 16


def test_a_run_that_fails_leaves_no_shared_memory(shared: Path):
    """Inputs after the first, which the model is traced with, are on their way when one fails."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="first"),
        helper.make_node("Reshape", ["r", "shape"], ["y"], name="reshape"),
    ]
    tensors = [numpy_helper.from_array(np.array([7, -1]), "shape")]
    proto = onnx_models.model(nodes, {"x": ("N", 4096)}, ["y"], tensors)
    given = [{"x": onnx_models.random(size, 4096)} for size in (7, 3, 7, 7)]
    with pytest.raises(CarmeRuntimeError, match="ONNX Runtime failed") as caught:
        carme_onnx.run(proto, given, workers=2, tasks=2)
    assert list(shared.iterdir()) == []
    assert "run the model again" in str(caught.value) and "resume" not in str(caught.value)


def test_what_fails_is_reported_in_a_sentence():
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"], name="reshape")]
    tensors = [numpy_helper.from_array(np.array([7, -1]), "shape")]
    proto = onnx_models.model(nodes, {"x": ("N", 4)}, ["y"], tensors)
    with pytest.raises(OnnxError, match="ONNX Runtime failed"):
        carme_onnx.run(proto, {"x": onnx_models.random(3, 4)}, workers=1)


def test_gpus_that_are_not_there_are_refused_before_anything_runs():
    with pytest.raises(OnnxError, match="cannot use GPUs"):
        carme_onnx.run(onnx_models.chain(2), {"x": onnx_models.random(2, 64)}, workers="cpu:1,gpu:1")


def test_threads_of_workers_are_a_number():
    model = carme_onnx.load(onnx_models.chain())
    for threads in (0, "2"):
        with pytest.raises(OnnxError, match="not a valid number of threads"):
            Runner(model, 2, threads=threads)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given, model = [{"x": onnx_models.random(4, 64)}], carme_onnx.load(onnx_models.chain())
    (tmp_path / "file").write_text("")
    with pytest.raises(OnnxError, match=r"cannot be written to .*/file/folder: Not a directory.*folder="):
        Runner(model, 1, folder=tmp_path / "file" / "folder").run(given)
    (tmp_path / "full" / "weights.bin").mkdir(parents=True)
    with pytest.raises(OnnxError, match=r"cannot be written to .*/full: Is a directory"):
        Runner(model, 1, folder=tmp_path / "full").run(given)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(OnnxError, match=r"the folder for temporary files: No such file.*TMPDIR"):
        Runner(model, 1).run(given)


def test_links_in_a_folder_are_not_followed_and_nobody_else_can_write_into_it(tmp_path: Path):
    linked_file = tmp_path / "other"
    linked_file.write_text("kept")
    (tmp_path / "old").mkdir()
    for name in ("weights.bin", "part_0.onnx", "onnx_pipeline.py", "onnx_pipeline.pickle"):
        (tmp_path / "old" / name).symlink_to(linked_file)
    given, model = [{"x": onnx_models.random(4, 64)}], carme_onnx.load(onnx_models.chain())
    found = Runner(model, 1, folder=tmp_path / "old").run(given)
    check(found[0], onnx_models.expected(onnx_models.chain(), given[0]))
    assert linked_file.read_text() == "kept" and not (tmp_path / "old" / "weights.bin").is_symlink()
    Runner(model, 1, folder=tmp_path / "new").run(given)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_pipeline_of_another_user_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Runner(carme_onnx.load(onnx_models.chain()), 1, folder=tmp_path).run([{"x": onnx_models.random(4, 64)}])
    script = str(tmp_path / "onnx_pipeline.py")
    assert Pipeline.saved(script).results == ["r7"]
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(PetriError, match=r"The pipeline in .* belongs to another user"):
        Pipeline.saved(script)
