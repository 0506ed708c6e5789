"""Ordinary scripts for PyTorch, Keras and Horovod in a session over two nodes."""

import base64
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from carme.errors import CarmeError
from carme.validation import NotebookKernel
from demo_site import ROOT, DemoSite
from patience import HANG

OPTIONS = {"nodes": "2", "gpus_per_node": "2", "minutes": "15", "title": "Backends"}
PROGRAMS = ROOT / "tests/native/programs"
KERAS = "/opt/carme/examples/digits_keras.py"
COMPARE = {
    "torch": """
import torch
one, *several = (torch.load(f"{n}.pt") for n in (1, 2, 4))
places = [each["places"] for each in several]
for each in several:
    assert all(torch.equal(weights, each["weights"][0]) for weights in each["weights"])
    torch.testing.assert_close(each["weights"][0], one["weights"][0], rtol=1e-5, atol=1e-6)
""",
    "tensorflow": """
import numpy
one, *several = (numpy.load(f"{n}.npz") for n in (1, 2, 4))
places = [[tuple(place.tolist()) for place in each["places"]] for each in several]
for each in several:
    assert (each["weights"] == each["weights"][0]).all()
    numpy.testing.assert_allclose(each["weights"][0], one["weights"][0], rtol=1e-4, atol=1e-6)
""",
}
SCRIPTS = {"torch": ("horovod_itself.py", "pt"), "tensorflow": ("horovod_itself_tensorflow.py", "npz")}
# rank, size, local rank and size, cross rank and size
TWO = [(0, 2, 0, 1, 0, 2), (1, 2, 0, 1, 1, 2)]
FOUR = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]


@contextmanager
def session(
    demo: DemoSite, image: str, script: Path | None = None, **options: str
) -> Iterator[NotebookKernel]:
    """A notebook in a session of two nodes, perhaps with a script in its folder and other options."""
    if demo.run("head", "test", "-f", f"/srv/carme/images/{image}.sif", check=False).returncode:
        pytest.skip(f"the image {image} is not built here; ./demo up --images {image} builds it")
    with demo.visitor(demo.user) as visitor:
        name = visitor.start(OPTIONS | options | {"image": image})
        visitor.wait(name, "ready", timeout=HANG)
        with visitor.kernel(visitor.open(name)) as kernel:
            if script:
                content = base64.b64encode(script.read_bytes()).decode()
                code = f"import base64; open('{script.name}', 'wb').write(base64.b64decode('{content}'))"
                assert kernel.run(code, timeout=HANG).ok
            try:
                yield kernel
            except (AssertionError, CarmeError) as error:  # the latter: a cell does not end
                job_id = demo.carme_json("session", "show", name)["job_id"]
                error.add_note(
                    "The job's log: " + demo.carme("logs", str(job_id), check=False).stdout[-3000:]
                )
                raise
            if script:
                kernel.run(f"import os; os.unlink('{script.name}')", timeout=HANG)
        visitor.stop(name)
        visitor.wait(name, "ended", timeout=HANG)


def trained(kernel: NotebookKernel, backend: str, how: str) -> str:
    """A hash of the trained model's bits."""
    cell = kernel.run(f"!carme-run -n 2 data_parallel.py {backend} {how}", timeout=2 * HANG)
    found = re.search(r"RESULT ([0-9a-f]{64})", cell.output)
    assert found, cell.output[-3000:]
    return found[1]


EVERYWHERE = """%%carme_run -n 2 --devices-per-node 1
import os, socket
print("rank", os.environ["RANK"], "at", socket.gethostname())
"""


def test_unmodified_scripts_train_to_the_same_bits_as_on_gloo(demo: DemoSite) -> None:
    with session(demo, "torch", PROGRAMS / "data_parallel.py") as kernel:
        # A cell as the program; the image has loaded the magic.
        cell = kernel.run(EVERYWHERE, timeout=HANG)
        assert cell.ok, cell.output
        assert set(re.findall(r"rank \d at n\d", cell.output)) == {"rank 0 at n1", "rank 1 at n2"}
        for how in ("ddp", "fsdp"):
            # Of two summands the order does not matter, so not a bit may differ.
            assert trained(kernel, "carme", how) == trained(kernel, "gloo", how)


@pytest.mark.parametrize("image", ["torch", "tensorflow"])
def test_a_keras_script_has_the_same_losses_on_any_number_of_ranks(demo: DemoSite, image: str) -> None:
    with session(demo, image) as kernel:
        losses: dict[int, list[float]] = {}
        for ranks in (1, 2, 4):
            cell = kernel.run(f"!carme-run -n {ranks} {KERAS} --epochs 2", timeout=2 * HANG)
            assert f"{ranks} ranks, Keras 3" in cell.output, cell.output[-3000:]
            assert f"on {image}" in cell.output
            losses[ranks] = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", cell.output)]
            assert len(losses[ranks]) == 2
        assert losses[2] == pytest.approx(losses[1], rel=1e-4)
        assert losses[4] == pytest.approx(losses[1], rel=1e-4)
        print(image, losses)


def large_model() -> tuple[str, str]:
    """The cells of the example notebook: the model on one node, and on two."""
    notebook = json.loads((ROOT / "containers/images/examples/04-large-models.ipynb").read_text())
    alone, both = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    return alone, both


def test_a_model_is_too_large_for_one_node(demo: DemoSite) -> None:
    """In a session with as little memory as the notebook says."""
    with session(demo, "torch", gpus_per_node="0", memory_mb_per_node="2048") as kernel:
        cell = kernel.run(large_model()[0], timeout=2 * HANG)
        ending = "was killed by signal 9 (SIGKILL). This is often a lack of memory"
        assert ending in cell.output and not cell.ok, cell.output
        # Not the kernel nor its server, although Linux may end a second process before the memory is free.
        assert kernel.run("print('here')", timeout=HANG).ok


def test_a_model_that_one_node_cannot_hold_trains_on_two(demo: DemoSite) -> None:
    """In a session with as little memory as the notebook says."""
    alone, both = large_model()
    assert len(set(both.splitlines()[1:]) - set(alone.splitlines()[1:])) == 2, "two lines more"
    with session(demo, "torch", gpus_per_node="0", memory_mb_per_node="2048") as kernel:
        cell = kernel.run(both, timeout=4 * HANG)
        assert cell.ok, cell.output + cell.error
        losses = [re.findall(rf"rank {rank}\] step \d: loss (\d\.\d+)", cell.output) for rank in (0, 1)]
        assert losses[0] == losses[1] and len(losses[0]) == 3, cell.output
        assert float(losses[0][2]) < float(losses[0][0]), cell.output


def test_srun_alone_starts_ranks_over_two_nodes_of_a_job(demo: DemoSite) -> None:
    """A batch job without an image, whose ranks Slurm starts; they know each other by the job's key."""
    inside = f"apptainer --quiet exec /srv/carme/images/torch.sif python {KERAS} --epochs 1"
    line = f"CARME_KEY_FILE=$CARME_JOB_FOLDER/fabric.key exec srun --nodes=2 --ntasks-per-node=1 {inside}"
    options = ["--json", "--time", "10m", "--nodes", "2"]
    job_id = json.loads(demo.carme("submit", *options, "--", "sh", "-c", line).stdout)["job_id"]
    message = demo.carme("logs", "--follow", str(job_id), timeout=2 * HANG).stdout
    assert "2 ranks, Keras 3" in message
    assert len(re.findall(r"loss \d+\.\d+", message)) == 1


# As on a site without Carme: the runtime alone, in the user's home. Its code is the image's.
PLAIN = f"""#!/bin/bash
set -eu
export PATH=/usr/bin:/bin
if env | grep ^CARME; then exit 9; fi
inside="apptainer --quiet exec --sharens /srv/carme/images/torch.sif python"
$inside -c "import carme_runtime, shutil; shutil.copytree(carme_runtime.__path__[0], 'env/carme_runtime')"
export PYTHONPATH=$PWD/env
run="python3 -m carme_runtime.launcher.command"
$run --dry-run -- true
$run --log-level INFO -x PYTHONPATH= -- $inside {KERAS} --epochs 1
ls -A ~/.carme
"""


def test_carme_run_uses_all_nodes_of_a_job_without_carme(demo: DemoSite) -> None:
    folder = f"/home/{demo.user}/plain-{os.urandom(4).hex()}"
    demo.run("head", "mkdir", folder, user=demo.user)
    options = ["--nodes=2", "--gpus-per-node=2", "--mem=3G", "--time=10", "--export=NONE", "--wait"]
    options += [f"--chdir={folder}", "--output=output.log"]
    try:
        command = ["sbatch", "--parsable", *options]
        ended = demo.run("head", *command, user=demo.user, data=PLAIN, check=False, timeout=2 * HANG)
        output = demo.run("head", "cat", f"{folder}/output.log").stdout
    finally:
        demo.run("head", "rm", "-r", folder)
    assert ended.returncode == 0, ended.stderr + output
    assert "On n2, which may have other cores or GPUs than this node, srun would start agents: srun" in output
    assert "rank 0 on n1," in output and "rank 2 on n2," in output and "4 ranks, Keras 3" in output, output
    assert len(re.findall(r"loss \d+\.\d+", output)) == 1
    assert f"slurm-{ended.stdout.strip()}-" not in output, "a folder of the run is left"


# What GPI-2 does first, with the variables that it reads: rank 0 is found by its line of the file of hosts.
GASPI = """
import os, pathlib, socket
rank, ranks = int(os.environ["GASPI_RANK"]), int(os.environ["GASPI_NRANKS"])
hosts = pathlib.Path(os.environ["GASPI_MFILE"]).read_text().split()
assert len(hosts) == ranks and os.environ["GASPI_SOCKET"] == "0"
place = (hosts[0], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(place) as server:
        peer, (address, _) = server.accept()
        assert address == hosts[1], (address, hosts)
        peer.sendall(b"from rank 0")
else:
    while True:
        try:
            peer = socket.create_connection(place, 60, (hosts[1], 0))
            break
        except ConnectionRefusedError:
            pass
print("RESULT", rank, ranks, socket.gethostname(), peer.recv(100) if rank else "")
"""


def test_programs_for_gpi2_find_each_other_over_two_nodes(demo: DemoSite) -> None:
    run = ["carme-run", "--backend", "gaspi", "-n", "2", "--", "python", "-c", GASPI]
    options = ["--json", "--image", "torch", "--nodes", "2", "--time", "10m"]
    job_id = json.loads(demo.carme("submit", *options, "--", *run).stdout)["job_id"]
    message = demo.carme("logs", "--follow", str(job_id), timeout=2 * HANG).stdout
    found = sorted(re.findall("RESULT (.*)", message))
    assert found == ["0 2 n1 ", "1 2 n2 b'from rank 0'"], message


def need_horovod(demo: DemoSite) -> None:
    if not demo.settings.horovod:
        pytest.skip("the images are built without Horovod here; ./demo up --horovod builds it")


@pytest.mark.parametrize("image", ["torch", "tensorflow"])
@pytest.mark.parametrize("backend", ["horovod", "mpi"])
def test_an_unmodified_horovod_script_trains_as_in_one_process(
    demo: DemoSite, image: str, backend: str
) -> None:
    need_horovod(demo)
    script, suffix = SCRIPTS[image]
    with session(demo, image, PROGRAMS / script) as kernel:
        message = ""
        for ranks in (1, 2, 4):
            run = f"!carme-run --backend {backend} -n {ranks} {script} {ranks}.{suffix}"
            message += kernel.run(run, timeout=2 * HANG).output
        cell = kernel.run(COMPARE[image] + "print('RESULT', *places)", timeout=HANG)
        kernel.run(f"!rm -f [124].{suffix}", timeout=HANG)
        assert f"RESULT {TWO} {FOUR}" in cell.output, message + cell.output + cell.error


def test_horovods_own_commands_need_no_ssh(demo: DemoSite) -> None:
    need_horovod(demo)
    script, suffix = SCRIPTS["torch"]
    with session(demo, "torch", PROGRAMS / script) as kernel:
        for launcher in ("horovodrun --gloo -np", "horovodrun --mpi -np", "mpirun -np"):
            message = ""
            for ranks in (1, 2, 4):
                # Both fill a host before they go to the next one.
                hosts = "n1:1,n2:1" if ranks == 2 else "n1:2,n2:2"
                run = f"!{launcher} {ranks} -H {hosts} python {script} {ranks}.{suffix}"
                message += kernel.run(run, timeout=2 * HANG).output
            cell = kernel.run(COMPARE["torch"] + "print('RESULT', *places)", timeout=HANG)
            kernel.run(f"!rm -f [124].{suffix}", timeout=HANG)
            assert f"RESULT {TWO} {FOUR}" in cell.output, message + cell.output + cell.error


@pytest.mark.parametrize("image", ["torch", "tensorflow"])
def test_horovods_wrapper_for_keras_is_refused(demo: DemoSite, image: str) -> None:
    need_horovod(demo)
    with session(demo, image) as kernel:
        for module in ("horovod.keras", "horovod.tensorflow.keras"):
            cell = kernel.run(f"import {module}", timeout=HANG)
            assert not cell.ok
            assert "does not average gradients" in cell.error.replace("\n", " "), cell.error
            assert "carme_runtime.keras" in cell.error
