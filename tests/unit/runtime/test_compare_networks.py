"""The networks and images of the comparison: their published sizes, other sizes, and tasks."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from carme_runtime.compare import tasks
from carme_runtime.compare.images import DATA
from carme_runtime.compare.networks import ALL_NETWORKS, NETWORKS
from carme_runtime.compare.rounds import Plan
from carme_runtime.compare.tasks import network_for
from carme_runtime.errors import CarmeRuntimeError
from patience import HANG


def test_the_work_has_the_networks_of_the_paper_and_of_its_successors() -> None:
    assert ALL_NETWORKS == (
        "mlp", "alexnet", "googlenet", "resnet20", "resnet50", "unet", "transformer",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("googlenet", 6_998_552),  # of its authors' file for Caffe, without the classifiers beside
        ("resnet50", 25_583_592),  # those that keras.applications.ResNet50 trains
    ],
)
def test_with_all_channels_a_network_has_the_published_size(name: str, parameters: int) -> None:
    network = network_for(name, "imagenet", width=1)
    assert network.shape == (224, 224, 3) and network.classes == 1000
    assert network.parameters() == parameters


def test_sizes_are_parameters() -> None:
    own = network_for("resnet50")
    assert own.shape == (64, 64, 1) and own.full_title == "ResNet-50, channels x 0.25"
    assert network_for("resnet50", side=32).parameters() == own.parameters()
    assert network_for("resnet50", width=0.5).parameters() > 3 * own.parameters()
    assert network_for("resnet50", width=1).full_title == "ResNet-50"
    assert network_for("resnet50", "faces").classes == 40
    assert network_for("unet", "imagenet").classes == 2, "an object, or not"
    assert network_for("transformer", "imagenet").shape == (14 * 14, 16 * 16 * 3 + 4)
    # A head of the transformer's attention has as many channels as the others.
    for width in (0.1, 0.3, 1, 1.7):
        wide = network_for("transformer", width=width).layers[0].outputs
        assert wide % 4 == 0 and wide > 0


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("data", ["digits", "imagenet"])
def test_a_network_takes_images_of_several_sizes(name: str, data: str) -> None:
    """By what plain NumPy makes of them: a number for each class, of each pixel where it judges pixels."""
    own = NETWORKS[name]
    for side in (own.multiple, 3 * own.multiple):
        network = network_for(name, data, side, 0.1)
        task = tasks.make(network, 4, seed=1, data=data)
        assert task.inputs.shape == (tasks.BATCHES, 4, *network.shape)
        assert task.inputs.dtype == np.float32 and task.targets.dtype == np.int64
        assert task.targets.shape == (tasks.BATCHES, 4, *([side, side] if own.judges_pixels else []))
        assert 0 <= task.targets.min() <= task.targets.max() < network.classes
        # With weights of the last layer that are small no class is preferred.
        assert task.first_loss(2) == pytest.approx(np.log(network.classes), rel=0.2)


@pytest.mark.parametrize(
    ("name", "side", "sentence"),
    [
        (
            "mlp",
            12,
            "The network 'mlp' takes no images with a side of 12 pixels. Use --size with a multiple of 8",
        ),
        ("googlenet", 224 + 8, "a multiple of 32, up to 1024"),
        ("unet", 2048, "takes no images with a side of 2048 pixels"),
    ],
)
def test_a_size_that_a_network_cannot_take_is_refused(name: str, side: int, sentence: str) -> None:
    with pytest.raises(CarmeRuntimeError) as refusal:
        Plan((), (name,), (1,), size=side).check()
    assert sentence in str(refusal.value)


def test_a_task_is_the_same_for_all_ranks_whatever_its_size(tmp_path: Path) -> None:
    network = network_for("unet", "imagenet", 16, 0.05)
    task = tasks.make(network, 4, seed=3, data="imagenet")
    tasks.write(task, tmp_path / "task.npz")
    found = tasks.read(tmp_path / "task.npz")
    assert (found.network, found.data) == (network, "synthetic images of ImageNet's shape")
    assert found.first_loss(2) == task.first_loss(2)
    reseeded = tasks.make(network, 4, seed=4, data="imagenet")
    assert reseeded.first_loss(2) != task.first_loss(2)


def test_a_network_for_pixels_learns_which_are_bright() -> None:
    task = tasks.make(network_for("unet", "imagenet", 16), 2, seed=1, data="imagenet")
    assert np.array_equal(task.targets, task.inputs.mean(-1) > 0.5)
    assert 0 < task.targets.mean() < 1


def test_faces_are_those_that_were_fetched_before(tmp_path: Path) -> None:
    """In a Python of its own: scikit-learn says where its data are once."""
    program = """
import sys
from carme_runtime.compare import tasks
from carme_runtime.errors import CarmeRuntimeError
try:
    task = tasks.make(tasks.network_for("resnet20", "faces"), 2, seed=1, data="faces")
except CarmeRuntimeError as error:
    sys.exit(str(error))
print(task.data, task.inputs.shape)
"""
    environment = os.environ | {"SCIKIT_LEARN_DATA": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "The faces of scikit-learn are not on this machine. Fetch them once with "
        "sklearn.datasets.fetch_olivetti_faces(), or use --data digits."
    )
    assert not list(tmp_path.iterdir()), "nothing is fetched by the comparison itself"


def test_each_set_of_images_is_named_in_the_users_guide() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/users/compare.md").read_text()
    assert all(f"`{name}`" in text for name in (*DATA, *NETWORKS))
