"""The gradients of the first step: what they must be, and who is void because they are others."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carme_runtime.compare import checks, reference, tasks, worker
from carme_runtime.compare.entries import Entry
from carme_runtime.compare.layers import Layer, channels_first, channels_last
from carme_runtime.compare.networks import NETWORKS
from carme_runtime.compare.programs import Work
from carme_runtime.compare.reference import loss
from carme_runtime.compare.results import Row
from carme_runtime.compare.tasks import Task, network_for

#: Of all kinds of layers, small.
SMALL = [("alexnet", 0.1), ("googlenet", 0.05), ("resnet20", 0.5), ("unet", 0.03), ("transformer", 0.1)]
Wrong = Callable[[str, np.ndarray], np.ndarray]


@pytest.mark.parametrize(("name", "width"), [*SMALL, ("tiny", 1.0)])
def test_gradients_are_the_slopes_of_the_loss(name: str, width: float) -> None:
    """In the direction of all gradients, and in that of each weight alone that has the largest ones.

    Without biases a ReLU's input may be exactly 0, where the loss has no slope.
    """
    task, random = tasks.make(network_for(name, width=width), 4, seed=1), np.random.default_rng(1)
    moved = {
        key: value + 0.1 * random.standard_normal(value.shape).astype(np.float32) * key.endswith(".bias")
        for key, value in task.weights.items()
    }
    task = dataclasses.replace(task, weights=moved)
    x, y = task.share(0, 1)
    found, kinks = task.first_gradients(1)
    exact = {key: value.astype(np.float64) for key, value in task.weights.items()}
    largest = sorted(found, key=lambda key: -float(np.linalg.norm(found[key])))[:2]
    for chosen in (list(found), *([key] for key in largest)):
        length = float(np.sqrt(sum(np.sum(found[key] ** 2) for key in chosen)))
        step = 1e-8
        ends = [
            loss(
                task.network,
                exact | {key: exact[key] + sign * step * found[key] / length for key in chosen},
                x[0],
                y[0],
            )
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx(length, rel=1e-4, abs=sum(kinks[key] for key in chosen))


@pytest.mark.parametrize("name", ["mlp", "tiny"])
def test_rounding_decides_nothing_in_an_mlp(name: str) -> None:
    task = tasks.make(NETWORKS[name], NETWORKS[name].batch, seed=1)
    x, y = task.share(0, 1)
    first, second = reference.gradients(task.network, task.weights, x[0], y[0])
    assert first is second


def test_ranks_have_the_mean_of_their_gradients() -> None:
    """Not that of the whole batch where a layer normalizes over the samples of a rank."""
    flat = tasks.make(network_for("tiny"), 8, seed=1)
    for name, value in flat.first_gradients(2)[0].items():
        assert np.allclose(value, flat.first_gradients(1)[0][name], rtol=1e-12, atol=1e-15)
    normal = tasks.make(network_for("resnet20", width=0.1), 4, seed=1)
    two, whole = (normal.first_gradients(ranks)[0]["c0.kernel"] for ranks in (2, 1))
    assert np.linalg.norm(two - whole) > 1e-3 * np.linalg.norm(whole)


def test_kernels_turn_to_channels_first_and_back() -> None:
    layer = Layer("dense", "d", 24, 5, image=(2, 3, 4))
    kernel = np.arange(120.0).reshape(24, 5)
    image = kernel.reshape(2, 3, 4, 5)
    assert np.array_equal(channels_first(layer, kernel), np.moveaxis(image, 2, 0).reshape(24, 5))
    assert np.array_equal(channels_last(layer, channels_first(layer, kernel)), kernel)
    plain = dataclasses.replace(layer, image=None)
    assert channels_last(plain, channels_first(plain, kernel)) is kernel


@pytest.mark.parametrize(("name", "width"), [*SMALL, ("tiny", 1.0)])
def test_pytorch_has_the_gradients_that_are_computed_without_it(
    name: str, width: float, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from carme_runtime.compare.programs.torch_networks import build, first_gradients, prepare_inputs

    task = tasks.make(network_for(name, width=width), 4, seed=2)
    model = build(task)
    x, y = torch.from_numpy(prepare_inputs(task.inputs)[0]), torch.from_numpy(task.targets[0])
    torch.nn.functional.cross_entropy(model(x), y).backward()
    row = judged(task, first_gradients(task, model), tmp_path)
    assert row.gradients.keys() == task.weights.keys() and not row.void, row.void
    assert checks.worst_gradient(row.gradients)[1] < 1e-4


def judged(task: Task, found: Any, folder: Path, from_weights: bool = False) -> Row:
    """A row whose contestant has these gradients on one rank."""
    tasks.write_gradients(*task.first_gradients(1), folder / "gradients.npz")
    work = Work(task, rank=0, ranks=1, threads=1)
    row = Row("jax", "JAX", task.network.name, 1)
    row.gradients = worker.compare_gradients(found, folder / "gradients.npz", from_weights, work)
    checks.void_wrong_gradients([row])
    return row


@pytest.fixture(scope="module")
def task() -> Task:
    return tasks.make(NETWORKS["tiny"], 8, seed=1)


def gradients(task: Task, wrong: Wrong) -> Iterator[tuple[str, np.ndarray]]:
    """The right ones in float32, but for what `wrong` makes of them."""
    for name, value in task.first_gradients(1)[0].items():
        yield name, wrong(name, value.astype(np.float32))


@pytest.mark.parametrize(
    ("wrong", "percent"),
    [
        (lambda name, value: -value, "200 %"),
        (lambda name, value: value * 1.001, "0.1 %"),
        (lambda name, value: value * 0.5, "50 %"),
        (lambda name, value: value * 0, "100 %"),
        (lambda name, value: value * np.float32(np.nan), "nan %"),
    ],
)
def test_gradients_with_another_sign_or_length_are_void(
    wrong: Wrong, percent: str, task: Task, tmp_path: Path
) -> None:
    row = judged(task, gradients(task, wrong), tmp_path)
    assert row.void.startswith("unequal work: the gradient of ")
    assert row.void.endswith(f" in its first step is {percent} from the one that these weights have")


@pytest.mark.parametrize("layer", ["d1", "d2", "out"])
@pytest.mark.parametrize("part", ["kernel", "bias"])
def test_a_single_weight_with_a_wrong_gradient_is_named(
    layer: str, part: str, task: Task, tmp_path: Path
) -> None:
    name = f"{layer}.{part}"
    row = judged(task, gradients(task, lambda each, value: value * (1.01 if each == name else 1)), tmp_path)
    assert row.void == (
        f"unequal work: the gradient of {name} in its first step is 1 % from the one that these weights have"
    )


def test_right_gradients_are_not_void_and_are_on_record(task: Task, tmp_path: Path) -> None:
    row = judged(task, gradients(task, lambda _, value: value), tmp_path)
    assert not row.void
    for name, value in task.first_gradients(1)[0].items():
        assert row.gradients[name]["norm"] == pytest.approx(np.linalg.norm(value), rel=1e-6)
        assert row.gradients[name]["expected"] == pytest.approx(np.linalg.norm(value), rel=1e-6)
        assert row.gradients[name]["distance"] < 1e-6 * row.gradients[name]["norm"]


def test_gradients_that_are_known_from_weights_are_as_exact_as_these(task: Task, tmp_path: Path) -> None:
    """As a step rounds its new weights; a wrong length of a hundredth is still found."""

    def from_weights(factor: float) -> Iterator[tuple[str, np.ndarray]]:
        rate = np.float32(task.network.rate)
        for name, value in task.first_gradients(1)[0].items():
            before = task.weights[name]
            after = before - rate * (factor * value).astype(np.float32)
            yield name, (before - after) / rate

    assert not judged(task, from_weights(1), tmp_path, from_weights=True).void
    assert "is 1 % from" in judged(task, from_weights(1.01), tmp_path, from_weights=True).void


def test_small_gradients_count_as_a_part_of_all() -> None:
    """Those behind a normalization are 0, and rounding makes something of them."""
    large = {"norm": 1.0, "expected": 1.0, "distance": 1e-7, "rounding": 0.0}
    small = {"norm": 1e-8, "expected": 1e-20, "distance": 1e-8, "rounding": 0.0}
    assert checks.worst_gradient({"a": large, "b": small}) == ("b", pytest.approx(1e-6))


def test_bf16_may_round_more_but_not_turn_around(task: Task, tmp_path: Path) -> None:
    for factor, is_void in ((1.3, False), (-1.0, True), (0.0, True)):
        row = judged(task, gradients(task, lambda _, value, by=factor: value * by), tmp_path)
        row.void = ""
        checks.void_wrong_gradients([row], checks.GRADIENT_TOLERANCES["bf16"])
        assert bool(row.void) == is_void, factor


def test_the_rank_with_the_largest_distance_counts() -> None:
    """Ranks that do not reduce their gradients have different ones."""
    near, far, none = ({"a": {"distance": value}} for value in (0.1, 0.2, float("nan")))
    for worst in (far, none):
        entry = Entry(Row("jax", "JAX", "tiny", 2), 1)
        entry._ask = lambda distances=worst, **_: [{"gradients": near}, {"gradients": distances}]  # type: ignore[method-assign]
        entry.compare_gradients(Path("file"))
        assert entry.row.gradients == worst
