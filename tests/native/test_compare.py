"""`carme compare` for real: equal networks in all frameworks that are installed, and two that take turns."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from carme_runtime.compare import load, stored, tasks
from carme_runtime.compare.contestants import CONTESTANTS
from carme_runtime.compare.errors import CompareError
from carme_runtime.compare.networks import ALL_NETWORKS, NETWORKS
from carme_runtime.compare.tasks import network_for
from patience import HANG

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
COMMAND = [sys.executable, "-c", "from carme_runtime.commands import run; run()", "compare"]

pytestmark = pytest.mark.timeout(3 * HANG)


def compare(folder: Path, *options: str, code: int = 0, limit: float = 2 * HANG) -> str:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    saved = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CARME"))}
    # Without rounds for minutes: the machine may be as restless as it likes.
    command = [*COMMAND, "--output", str(folder), "--minutes", "0", *options]
    done = subprocess.run(
        command, env=saved | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_two_contestants_on_two_ranks(tmp_path: Path) -> None:
    out = compare(tmp_path / "out", "torch-gloo", "parallelize", "--networks", "tiny", "--rounds", "3")
    result = load(tmp_path / "out/compare.json")
    assert [(row.contestant, row.ranks, row.void) for row in result.rows] == [
        (name, ranks, "") for name in ("torch-gloo", "parallelize") for ranks in (1, 2)
    ]
    for row in result.rows:
        assert len(row.turns) >= 3 and row.step.low <= row.step.median <= row.step.high
        assert row.start_s > 0 and row.peak_bytes > 50 << 20 and "torch" in row.versions
        assert row.losses == pytest.approx(result.rows[0].losses, abs=1e-4)
        assert sum(row.parts_ms.values()) > 0 and "forward" in row.parts_ms
        assert row.half_loss_steps == result.rows[0].half_loss_steps
        assert row.half_loss_s is not None and row.half_loss_s.median > 0
        if row.contestant == "parallelize" and row.ranks == 2:
            assert 0 < row.predicted["low"] <= row.predicted["ms"] <= row.predicted["high"]
        else:
            assert not row.predicted
    assert "PyTorch DDP (Gloo)" in (tmp_path / "out/compare.html").read_text()
    assert "With MLP for a quick look on 2 ranks, " in out
    # What it needed while it ran is gone.
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["compare.html", "compare.json"]


@pytest.mark.timeout(5 * HANG)  # seven contestants start twice
@pytest.mark.parametrize("source", ["warm", "cold"])
def test_all_do_the_same_work_with_batches_from_files(tmp_path: Path, source: str) -> None:
    """Three steps agree to 1e-4 with what they are without files, and reading is a part of a step."""
    try:
        stored.check_folder(tmp_path)
    except CompareError as error:
        pytest.skip(str(error))
    names = [name for name in CONTESTANTS if name != "mxnet" and not CONTESTANTS[name].missing()]
    options = ("--networks", "tiny", "--ranks", "2", "--rounds", "1", "--input", source)
    compare(tmp_path / "out", *names, *options, limit=4 * HANG)
    result = load(tmp_path / "out/compare.json")
    exact = tasks.make(network_for("tiny"), NETWORKS["tiny"].batch, 1).first_loss(2)
    assert result.options["input"] == source and [row.void for row in result.rows] == [""] * len(names)
    for row in result.rows:
        assert row.losses[0] == pytest.approx(exact, abs=1e-4) and not row.predicted
        assert row.losses == pytest.approx(result.rows[0].losses, abs=1e-4)
    assert all(row.parts_ms["input"] > 0 for row in result.rows if row.contestant == "torch-gloo")
    assert f"({source})" in (tmp_path / "out/compare.html").read_text()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["compare.html", "compare.json"]


def test_jax_reduces_all_gradients_of_a_step_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what XLA has made of the step: of several arrays, ranks on processors reduce one after the other."""
    pytest.importorskip("jax")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path / 'xla'} --xla_dump_hlo_as_text")
    compare(tmp_path / "out", "jax", "--networks", "tiny", "--ranks", "2", "--rounds", "1")
    programs = [path.read_text() for path in (tmp_path / "xla").glob("*train*after_optimizations.txt")]
    reduced = [re.findall(r" all-reduce\(([^)]*)\)", text) for text in programs]
    assert programs and all(len(found) == 1 and "," not in found[0] for found in reduced), reduced
    assert not load(tmp_path / "out/compare.json").rows[0].void


@pytest.mark.timeout(9 * HANG)  # eight networks, one after the other
def test_mxnet_with_a_python_of_its_own_does_the_same_work(tmp_path: Path) -> None:
    """In all networks; its NumPy is one that the others cannot use."""
    python = Path(sys.prefix) / "mxnet/bin/python"
    if not python.exists():
        pytest.skip("MXNet needs Python 3.11 at most, for which ./test native makes it an environment")
    networks = ",".join(NETWORKS)
    names = ("mxnet", "torch-gloo")
    options = ("--python", f"mxnet={python}", "--networks", networks, "--ranks", "2", "--rounds", "1")
    compare(tmp_path / "out", *names, *options, limit=8 * HANG)
    rows = load(tmp_path / "out/compare.json").rows
    assert [row.void for row in rows] == [""] * len(rows) and len(rows) == 2 * len(NETWORKS)
    assert {row.versions["mxnet"] for row in rows if row.contestant == "mxnet"} == {"1.9.1"}
    for peer in ("mxnet", "torch-gloo"):
        assert [row.losses for row in rows if row.contestant == peer] == [
            pytest.approx(row.losses, abs=1e-4) for row in rows if row.contestant == "torch-gloo"
        ]


@pytest.mark.timeout(5 * HANG)
def test_horovod_itself_does_the_same_work(tmp_path: Path) -> None:
    """With PyTorch and with TensorFlow, in which it averages the gradients of two ranks."""
    names = [name for name in ("horovod", "horovod-tensorflow") if not CONTESTANTS[name].missing()]
    if not names:
        pytest.skip("Horovod is not installed in this environment")
    options = ("--networks", "tiny", "--ranks", "2", "--rounds", "1")
    compare(tmp_path / "out", *names, "horovod-face", *options, limit=4 * HANG)
    rows = load(tmp_path / "out/compare.json").rows
    assert [row.void for row in rows] == [""] * (len(names) + 1)
    for row in rows:
        assert ("horovod" in row.versions) is (row.contestant in names)
        exact = tasks.make(network_for(row.network), row.batch, 1)
        assert row.losses[0] == pytest.approx(exact.first_loss(row.ranks), abs=1e-4)
        assert row.gradients


def test_all_compute_in_bf16_on_request(tmp_path: Path) -> None:
    """Their losses are near those of float32, and not the same."""
    names = [
        name
        for name in (
            "torch-gloo",
            "parallelize",
            "horovod-face",
            "keras-torch",
            "keras-tensorflow",
            "tensorflow",
            "jax",
        )
        if not CONTESTANTS[name].missing()
    ]
    compare(tmp_path / "out", *names, "--networks", "tiny", "--rounds", "1", "--precision", "bf16")
    result = load(tmp_path / "out/compare.json")
    exact = tasks.make(NETWORKS["tiny"], NETWORKS["tiny"].batch, 1)
    assert result.environment["precision"] == "bf16"
    assert "in bf16." in (tmp_path / "out/compare.html").read_text()
    for row in result.rows:
        assert not row.void, row
        difference = abs(row.losses[0] - exact.first_loss(row.ranks))
        assert 1e-6 < difference < 2e-2 * row.losses[0], row.contestant


def test_the_work_of_a_contestant_that_is_unequal_is_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a momentum of its own, its first loss is right and its third is not."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('KERAS_BACKEND') == 'torch':\n"
        "    from carme_runtime.compare import tasks\n"
        "    tasks.MOMENTUM = 0.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ("torch-gloo", "horovod-face", "keras-torch")
    compare(tmp_path / "out", *names, "--networks", "tiny", "--ranks", "1", "--rounds", "1")
    rows = {row.contestant: row for row in load(tmp_path / "out/compare.json").rows}
    assert rows["keras-torch"].void.startswith("unequal work: the loss of its step 3 is ")
    assert not rows["torch-gloo"].void and not rows["horovod-face"].void
    assert rows["keras-torch"].void in (tmp_path / "out/compare.html").read_text()


def test_a_contestant_with_other_weights_is_void_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its first loss, which is not that of the weights that all were given."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('KERAS_BACKEND') == 'torch':\n"
        "    from carme_runtime.compare import tasks\n"
        "    read = tasks.read\n"
        "    def changed(file):\n"
        "        task = read(file)\n"
        "        for name in task.weights:\n"
        "            task.weights[name] = 1.5 * task.weights[name]\n"
        "        return task\n"
        "    tasks.read = changed\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ("keras-torch", "torch-gloo")
    out = compare(tmp_path / "out", *names, "--networks", "tiny", "--rounds", "1")
    rows = load(tmp_path / "out/compare.json").rows
    void = {row.ranks: row.void for row in rows if row.contestant == "keras-torch"}
    first = tasks.make(NETWORKS["tiny"], NETWORKS["tiny"].batch, 1)
    for ranks in (1, 2):
        expected = f"and with these weights it is {first.first_loss(ranks):.6f}"
        assert (
            void[ranks].startswith("unequal work: the loss of its first step is ") and expected in void[ranks]
        )
        assert void[ranks] in (tmp_path / "out/compare.html").read_text() and void[ranks] in out
    assert all(not row.void for row in rows if row.contestant == "torch-gloo")
    assert all(not row.turns and row.status == "void" for row in rows if row.contestant == "keras-torch")


def test_a_contestant_whose_gradients_are_too_long_is_void_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a hundredth: its losses do not show that."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('CARME_COMPARE_ENTRY', '').startswith('horovod-face'):\n"
        "    from torch.nn import functional\n"
        "    right = functional.cross_entropy\n"
        "    def longer(*arguments):\n"
        "        loss = right(*arguments)\n"
        "        return loss.detach() + 1.01 * (loss - loss.detach())\n"
        "    functional.cross_entropy = longer\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ("torch-gloo", "horovod-face")
    compare(tmp_path / "out", *names, "--networks", "tiny", "--ranks", "1", "--rounds", "1")
    rows = {row.contestant: row for row in load(tmp_path / "out/compare.json").rows}
    void = rows["horovod-face"].void
    assert void.startswith("unequal work: the gradient of ") and " is 1 % from the one" in void
    assert not rows["torch-gloo"].void and rows["torch-gloo"].gradients


def test_a_comparison_in_which_all_are_void_fails_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One contestant needs a module whose name no module can have, so it is installed nowhere."""
    (tmp_path / "sitecustomize.py").write_text(
        "from carme_runtime.compare.contestants import CONTESTANTS, Contestant\n"
        "CONTESTANTS['nowhere'] = Contestant(\n"
        "    'nowhere', 'Installed nowhere', 'torch', 'torch_ddp', ('torch', 'no-module')\n"
        ")\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = compare(tmp_path / "out", "nowhere", code=1)
    assert "All rows are void, so nothing was measured." in out and "not installed: no-module" in out
    assert json.loads((tmp_path / "out/compare.json").read_text())["rows"][0]["status"] == "void"


@pytest.mark.timeout(9 * HANG)  # five frameworks make and compile large networks
@pytest.mark.parametrize("network", ["googlenet", "resnet50", "unet"])
def test_all_frameworks_do_the_same_work_with_large_networks(tmp_path: Path, network: str) -> None:
    """Of each framework one contestant, so that they fit into memory at once; three steps agree to 1e-4."""
    names = ("torch-gloo", "keras-torch", "keras-tensorflow", "tensorflow", "jax")
    able = [name for name in names if not CONTESTANTS[name].missing()]
    compare(tmp_path / "out", *able, "--networks", network, "--ranks", "1", "--rounds", "1", limit=8 * HANG)
    rows = load(tmp_path / "out/compare.json").rows
    assert [(row.contestant, row.void) for row in rows] == [(name, "") for name in able]
    expected = tasks.make(network_for(network), NETWORKS[network].batch, 1).first_loss(1)
    assert len(able) > 1
    for row in rows:
        assert len(row.losses) == 3 and row.losses[0] == pytest.approx(expected, abs=1e-4)
        assert row.losses == pytest.approx(rows[0].losses, abs=1e-4)
        assert row.losses[2] != pytest.approx(row.losses[0], abs=1e-4), "the steps train"


def test_images_of_imagenets_shape_and_sizes_that_were_chosen(tmp_path: Path) -> None:
    options = ("--networks", "unet,transformer", "--data", "imagenet", "--size", "32", "--width", "0.1")
    ranks = ("--batch", "8", "--rounds", "1")
    compare(tmp_path / "out", "torch-gloo", "parallelize", *options, *ranks)
    result = load(tmp_path / "out/compare.json")
    assert [row.void for row in result.rows] == [""] * 8
    assert result.data == "synthetic images of ImageNet's shape"
    page = (tmp_path / "out/compare.html").read_text()
    assert "U-Net, channels x 0.1 (" in page and "samples of 32x32x3" in page and "samples of 16x196" in page


def test_faces_that_scikit_learn_has_fetched_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file as scikit-learn leaves it there, with other faces."""
    joblib = pytest.importorskip("joblib")
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    options = ("torch-gloo", "--data", "faces", "--networks", "resnet20", "--ranks", "1", "--rounds", "1")
    out = compare(tmp_path / "out", *options, code=1)
    assert "The faces of scikit-learn are not on this machine. Fetch them once with" in out
    assert not list((tmp_path / "out").iterdir()), "nothing half-done stays behind"
    joblib.dump(np.random.default_rng(1).random((400, 4096), np.float32), tmp_path / "data/olivetti_py3.pkz")
    compare(tmp_path / "out", *options)
    result = load(tmp_path / "out/compare.json")
    assert result.data == "the Olivetti faces of scikit-learn" and not result.rows[0].void


#: Of each network its own size, and images of ImageNet's shape as they are.
SIZES = [(name, "digits", None) for name in ALL_NETWORKS]
SIZES += [(name, "imagenet", 0.1) for name in ("alexnet", "googlenet", "resnet50", "transformer")]


@pytest.mark.parametrize(("name", "data", "width"), SIZES)
def test_networks_of_pytorch_are_those_that_are_computed_without_it(
    name: str, data: str, width: float | None
) -> None:
    import torch
    from torch.nn import functional

    from carme_runtime.compare.programs.torch_networks import build, prepare_inputs

    task = tasks.make(network_for(name, data, width=width), 8, seed=3, data=data)
    for ranks in (1, 2):
        shares = [task.share(rank, ranks) for rank in range(ranks)]
        losses = [
            functional.cross_entropy(
                build(task)(torch.from_numpy(prepare_inputs(x)[0])), torch.from_numpy(y[0])
            ).item()
            for x, y in shares
        ]
        assert sum(losses) / ranks == pytest.approx(task.first_loss(ranks), abs=1e-4)


@pytest.mark.parametrize(("name", "data", "width"), SIZES)
def test_networks_of_jax_are_those_that_are_computed_without_it(
    name: str, data: str, width: float | None
) -> None:
    jax = pytest.importorskip("jax")
    from carme_runtime.compare.programs.jax_shards import forward

    task = tasks.make(network_for(name, data, width=width), 8, seed=3, data=data)
    logits = jax.nn.log_softmax(forward(task.network.layers, task.weights, task.inputs[0]))
    loss = -jax.numpy.take_along_axis(logits, task.targets[0][..., None], -1).mean()
    assert float(loss) == pytest.approx(task.first_loss(1), abs=1e-4)


def test_turns_beside_a_neighbour_are_marked(tmp_path: Path) -> None:
    """One that computes on all cores now and then, as the benchmark starts it."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("benchmark_of_compare", BENCHMARKS / "compare.py")
        assert spec and spec.loader
        benchmark = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(benchmark)
    finally:
        sys.path.remove(str(BENCHMARKS))
    with benchmark.neighbour() as spells:
        compare(tmp_path / "out", "torch-gloo", "--networks", "tiny", "--ranks", "1", "--rounds", "40")
    result = load(tmp_path / "out/compare.json")
    marked = benchmark.marked(result, spells)
    assert marked["disturbed_turns"] >= 3 and marked["ours"] >= 95, marked


def test_a_task_survives_its_file(tmp_path: Path) -> None:
    task = tasks.make(NETWORKS["tiny"], 8, seed=1)
    tasks.write(task, tmp_path / "task.npz")
    found = tasks.read(tmp_path / "task.npz")
    assert (found.network, found.data, found.batch) == (task.network, task.data, 8)
    assert found.first_loss(2) == task.first_loss(2)
    peer = tasks.make(NETWORKS["tiny"], 8, seed=2)
    assert peer.first_loss(1) != task.first_loss(1)
