"""Keras models that are trained by all ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG

PROGRAMS = Path(__file__).parent / "programs"

# Sums over ranks come in another order than in one process. Measured: 1e-5 at most.
RELATIVE, ABSOLUTE = 1e-4, 1e-6
KERAS_DIFFERS = ("shuffled", "tensorflow_data")


def train(launcher, folder, nodes, *arguments, program="keras_training"):
    """The results of every rank."""
    ranks = launcher.start(program, nodes, str(folder / "RANK.json"), *arguments)
    assert ranks.finish(3 * HANG) == [0] * len(nodes), ranks.output()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(nodes))]


def run(launcher, program, nodes, *arguments):
    """Ranks of a program that imports Keras' backends, which takes minutes on a busy machine."""
    ranks = launcher.start(program, nodes, *arguments)
    assert ranks.finish(3 * HANG) == [0] * len(nodes), ranks.output()
    return ranks


def compare(tested, expected, where):
    if isinstance(expected, dict | list):
        assert len(tested) == len(expected), where
        for name in expected if isinstance(expected, dict) else range(len(expected)):
            compare(tested[name], expected[name], f"{where}, {name}")
    else:
        assert tested == pytest.approx(expected, RELATIVE, ABSOLUTE), where


@pytest.fixture(scope="module")
def by_keras_alone():
    return {}


@pytest.mark.timeout(7 * HANG)  # TensorFlow makes its graphs anew for every model and length of a share
@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 0, 1], [0, 0, 0, 0]], ids=["1", "2", "3", "4"])
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_results_do_not_depend_on_the_number_of_ranks(
    launcher, tmp_path, monkeypatch, by_keras_alone, backend, nodes
):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    if backend not in by_keras_alone:
        by_keras_alone[backend] = train(launcher, tmp_path, [0], "plain")[0]
        if backend == "tensorflow":
            # Keras shuffles with TensorFlow's generator there, this package with NumPy's; and data that
            # shuffle themselves are opened once less.
            alone = train(launcher, tmp_path, [0])[0]
            by_keras_alone[backend] |= {name: alone[name] for name in KERAS_DIFFERS}
    for rank, tested in enumerate(train(launcher, tmp_path, nodes)):
        compare(tested, by_keras_alone[backend], f"rank {rank} of {len(nodes)}")


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_loops_of_a_script_do_not_depend_on_the_number_of_ranks(launcher, tmp_path, monkeypatch, backend):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    alone = train(launcher, tmp_path, [0], "plain", program="keras_loop")[0]
    for nodes in ([0], [0, 0]):
        for rank, tested in enumerate(train(launcher, tmp_path, nodes, program="keras_loop")):
            compare(tested, alone, f"rank {rank} of {len(nodes)}")


@pytest.mark.parametrize(
    ("backend", "nodes"),
    [("torch", [0]), ("torch", [0, 0]), ("torch", [0, 0, 1, 1]), ("tensorflow", [0]), ("tensorflow", [0, 1])],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
@pytest.mark.parametrize(
    "what",
    [
        *(("keras_scripts", what) for what in ("callbacks", "backup", "saving", "layers_with_state")),
        *(("keras_scripts", what) for what in ("micro_batches", "sequential")),
        ("keras_tensors", "tensors"),
        ("keras_tensors", "groups"),
    ],
    ids=lambda value: value[1],
)
def test_scripts(launcher, tmp_path, monkeypatch, backend, nodes, what):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    folder = tmp_path / "shared"
    folder.mkdir()
    program, kind = what
    run(launcher, program, nodes, kind, str(folder))


@pytest.mark.parametrize(
    ("backend", "what"),
    [
        *(
            (backend, what)
            for backend in ("torch", "tensorflow")
            for what in ("optimizers", "outputs", "stopping", "numbering")
        ),
        ("torch", "workers"),
        ("tensorflow", "texts"),
        ("tensorflow", "compilation"),
    ],
)
def test_scripts_on_two_ranks(launcher, tmp_path, monkeypatch, backend, what):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    run(launcher, "keras_scripts", [0, 0], what, str(tmp_path))


def test_ranks_that_send_different_tensors_are_named(launcher, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    run(launcher, "keras_tensors", [0, 0], "differing", str(tmp_path))


def test_gradients_travel_while_backpropagation_goes_on(launcher, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    run(launcher, "keras_scripts", [0, 1], "overlap", str(tmp_path))


@pytest.mark.parametrize("everywhere", [False, True], ids=["rank 0", "all"])
def test_who_prints(launcher, tmp_path, monkeypatch, everywhere):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    if everywhere:
        monkeypatch.setenv("TNT_OUTPUT_ON_ALL_DEVICES", "true")
    ranks = run(launcher, "keras_scripts", [0, 0], "printing", str(tmp_path))
    for rank, message in ranks.outputs.items():
        for text in ("Total params", "LearningRateScheduler setting", "4/4 - ", "2/2 - ", "predicted"):
            assert (text in message) == (everywhere or rank == 0), f"rank {rank}, {text}: {message}"


def test_tensorboards_of_all_ranks(launcher, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")  # which writes them
    monkeypatch.setenv("TNT_TENSORBOARD_ON_ALL_DEVICES", "true")
    run(launcher, "keras_scripts", [0, 0], "tensorboards", str(tmp_path))


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_the_threshold_of_fusion_says_in_how_many_parts_gradients_travel(backend):
    run = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "2", "--log-level", "DEBUG"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "CARME"))}
    environment |= {"KERAS_BACKEND": backend, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    sums = set()
    # Six gradients, of 12 to 1600 bytes; which of them meet is up to the backend's order.
    for options, least, most in (
        ([], 1, 1),
        (["--fusion-threshold", "1"], 2, 3),
        (["--fusion-threshold", "0"], 6, 6),
    ):
        done = subprocess.run(
            [*run, *options, "--", str(PROGRAMS / "fused.py")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        parts = set(map(int, re.findall(r"Gradients are reduced in (\d+) parts", done.stderr)))
        assert len(parts) == 1 and least <= min(parts) <= most, done.stderr
        sums.update(re.findall(r"SUM .*", done.stdout))
    assert len(sums) == 1  # two numbers have one sum, however many travel together


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_mistakes_are_reported_to_all_ranks_and_do_no_harm(launcher, monkeypatch, backend):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    ranks = run(launcher, "keras_mistakes", [0, 0])
    message = [
        dict(line.split(": ", 1) for line in ranks.outputs[rank].splitlines() if ": " in line)
        for rank in range(2)
    ]
    both = {
        "batch size": "batch_size is 10 on rank 0, but 8 on rank 1. Give the same",
        "epochs": "epochs is 3 on rank 0, but 2 on rank 1.",
        "small": "A global batch of 1 is too small for 2 ranks: rank 1 would have nothing to do.",
        "small batches": "A global batch of 1 is too small for 2 ranks",
        "model": "Variable 0 of model and optimizer is (4, 2) of float32 on rank 0, but (4, 3)",
        "layers": "The number of variables of model and optimizer is 4 on rank 0, but 6 on rank 1. Build",
        "optimizer": "optimizer is SGD on rank 0, but Adam on rank 1.",
        "call": "call is fit on rank 0, but evaluate on rank 1.",
        "generator's size": "Batch 0 has 8 samples on rank 0, but 6 on rank 1.",
        "generator's length": "The data set ended after 3 batches on rank 1, but not on the others.",
        "order": "Batch 0 has other samples on rank 1 than on rank 0. Give all ranks the same data set",
        "arrays": "Batch 0 has other samples on rank 1 than on rank 0.",
        "micro-batch": "batch_size=10 is not tnt_micro_batch_size=3 times 2 ranks.",
        "micro-batches": "The data set comes in batches of 8 samples, but the micro-batch size asks for 6",
        "split": "validation_split works on arrays only.",
        "jit": "jit_compile=True would compile the exchange between ranks into the model.",
        "subclass": "carme_runtime.keras.Model cannot be subclassed.",
        "root": "There is no rank 7 among 2 ranks.",
        "text": "An object of type str cannot be sent.",
        "shapes": "TensorAllreducer was made for ndarray[40, 4], and got ndarray[40, 2].",
        "end": "all is well",
    }
    for rank in range(2):
        for name, text in both.items():
            assert text in message[rank][name], f"rank {rank}, {name}"
    failed = {
        "kind": ("An object of type set is not a data set. Give NumPy arrays", 1),
        "generator": ("OSError: the disk is gone", 1),
        "file": ("'/proc/none.keras'", 0),
    }
    for name, (text, rank) in failed.items():
        assert text in message[rank][name], name
    assert "Rank 1 cannot go on: InvalidCall: An object of type set" in message[0]["kind"]
    assert "The data set failed in batch 5 on rank 1." in message[0]["generator"]
    assert "Rank 0 cannot go on: " in message[1]["file"]
