"""Models run on several nodes of a job: real agents on this host, each as if on a node of its own."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnx_models

SCRIPT = '''
import contextlib, json, os, signal, sys, time
from pathlib import Path
import numpy as np
import carme_runtime.onnx as carme_onnx
from carme_runtime.onnx import Runner
from carme_runtime.onnx import running
from carme_runtime.onnx.execution import TaskBody
from carme_runtime.petri import PetriError

identity = []
MARK = Path("held")
run_task = TaskBody._run

def held(self, *arguments):
    """Never end the first task that a worker of this node begins, until the mark is there."""
    with contextlib.suppress(FileExistsError):
        MARK.touch(exist_ok=False)
        while True:
            time.sleep(60)
    return run_task(self, *arguments)

def ran_tasks(run):
    return sum(n for name, n in run.status()["fired"].items() if name.startswith("part"))

def watch(run, number):
    """Kill the worker of this node, which ends no task, when the other node has run tasks."""
    if "kill" in sys.argv and number == 5:
        while ran_tasks(run) < 4:
            time.sleep(0.05)
        while not run.workers:  # the other node may have been quicker than this one's first worker
            time.sleep(0.05)
        MARK.touch()  # the next worker runs every task, whether this one has begun one or not
        os.kill(run.workers[0], signal.SIGKILL)

def waiting(self, *arguments):
    """End no task before the mark is there."""
    while not MARK.exists():
        time.sleep(0.05)
    return run_task(self, *arguments)

def watch_loss(run, number):
    """The other node is lost when it has tensors of two micro-batches, and this one has ended no task.

    This one has a copy of those of a single one at most: of the task that it is at.
    """
    if number != 5 or MARK.exists():
        return
    while ran_tasks(run) < 4:  # each micro-batch has three
        time.sleep(0.05)
    print(f"carme-net-{os.getuid()}-{run._ranges.store.identity}@n2", flush=True)
    while len(run.status()["nodes"]) > 1:
        time.sleep(0.05)
    MARK.touch()

def fail(self, *arguments):
    """A task of this node fails when the other one has large results in its memory."""
    while not MARK.exists():
        time.sleep(0.05)
    raise LookupError("nothing here")

def watch_memory(run, number):
    other = f"carme-net-{os.getuid()}-{run._ranges.store.identity}@n2/[!.]*"
    while number == 5 and not list(Path("/dev/shm").glob(other)):
        time.sleep(0.05)
    MARK.touch() if number == 5 else None
    identity[:] = [run._ranges.store.identity]

def failed(given):
    """What a run that fails leaves in shared memory, which both nodes have here: nothing else frees it."""
    running._free = lambda folder: None
    TaskBody._run = fail
    try:
        Runner(carme_onnx.load("model.onnx"), "job", tasks=3, watch=watch_memory).run(given)
    except PetriError as error:
        left = [each.name for each in Path("/dev/shm").glob(f"carme-net-*-{identity[0]}*")]
        print(json.dumps([error.message, left]))

if __name__ == "__main__":
    if "fail" in sys.argv:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        failed([{"x": x[None]} for x in np.load("x.npy")])
        sys.exit()
    # Workers of this node are forked; those of the other one import it as it is.
    if "kill" in sys.argv:
        TaskBody._run = held
    if "lose" in sys.argv:
        TaskBody._run, watch = waiting, watch_loss
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one worker on this node
    given = [{"x": x[None]} for x in np.load("x.npy")]
    runner = Runner(carme_onnx.load("model.onnx"), "job", tasks=3, watch=watch)
    found = runner.run(given)
    np.savez("y.npz", **{name: np.concatenate([each[name] for each in found]) for name in found[0]})
    print(json.dumps([runner.notices, sorted(each.name for each in Path.cwd().iterdir())]))
'''


def begun(make_job: Callable[..., Any], folder: Path, *arguments: str) -> tuple[Any, Any]:
    """A job of two nodes, and the program that runs a model of branches on them."""
    proto, x = onnx_models.branches(batch=1, size=192), onnx_models.random(8, 3, 192, 192)
    onnx.save(proto, folder / "model.onnx")
    np.save(folder / "x.npy", x)
    (folder / "program.py").write_text(SCRIPT)
    job = make_job("n1", "n2")
    environment = job.node_environment(0) | {"CARME_AGENT": str(job.socket(0)), "SLURM_JOB_NUM_NODES": "2"}
    return job, job.start([sys.executable, "program.py", *arguments], environment)


def started(make_job: Callable[..., Any], folder: Path, *arguments: str) -> list[Any]:
    """Run it to its end; what the program printed."""
    return ended(begun(make_job, folder, *arguments)[1])


def ended(process: Any) -> list[Any]:
    code, out, errors = process.wait()
    assert code == 0, errors
    return json.loads(out)


def ran(make_job: Callable[..., Any], folder: Path, *arguments: str) -> list[Any]:
    """Run it, and compare it with ONNX Runtime."""
    printed = started(make_job, folder, *arguments)
    check_results(folder)
    return printed


def check_results(folder: Path) -> None:
    proto, x = onnx.load(folder / "model.onnx"), np.load(folder / "x.npy")
    found = np.load(folder / "y.npz")
    for number, each in enumerate(x):
        for name, array in onnx_models.expected(proto, {"x": each[None]}).items():
            np.testing.assert_allclose(found[name][number][None], array, rtol=1e-4, atol=1e-4)


def test_a_model_on_two_nodes_gives_what_onnx_runtime_gives(make_job: Callable[..., Any], tmp_path: Path):
    notices, left = ran(make_job, tmp_path)
    assert notices == [] and not any(name.startswith("carme-onnx-") for name in left)


def test_a_worker_that_is_killed_on_one_of_two_nodes_changes_nothing_but_the_time(
    make_job: Callable[..., Any], tmp_path: Path
):
    """The other node runs tasks meanwhile: without it the program would wait for ever."""
    notices, _ = ran(make_job, tmp_path, "kill")
    assert all("was ended by signal 9" in each for each in notices)


def test_a_node_that_is_lost_with_tensors_changes_nothing_but_the_time(
    make_job: Callable[..., Any], tmp_path: Path
):
    job, process = begun(make_job, tmp_path, "lose")
    lost = Path("/dev/shm", process.line())
    try:
        # This machine is "n2", too: nets of other tests would save what is lost with it (`store.sweep`).
        (lost / ".run").unlink()
        job.joined[0].popen.kill()
        notices, left = ended(process)
    finally:
        shutil.rmtree(lost, ignore_errors=True)
    assert notices[0] == (
        "Tensors were lost with n2: the model ran again from its beginning on the other nodes."
    )
    check_results(tmp_path)
    assert not any(name.startswith("carme-onnx-") for name in left)


def test_a_run_that_fails_leaves_nothing_in_the_memory_of_any_node(
    make_job: Callable[..., Any], tmp_path: Path
):
    message, left = started(make_job, tmp_path, "fail")
    assert message.endswith("failed: LookupError: nothing here.") and left == []
