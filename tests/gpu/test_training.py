"""Training on GPU tensors with each way that the runtime has. Needs a GPU, and the runtime's native core."""

import importlib.util

import pytest
from ranks import run

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("There is no GPU.", allow_module_level=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parallelize_trains_as_one_process(ranks: int):
    run("training", ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_horovod_scripts_train_on_gpus(ranks: int):
    run("horovod_on_gpus", ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_keras_on_torch_trains_on_gpus(ranks: int):
    if importlib.util.find_spec("keras") is None:  # an import would look for its usual backend
        pytest.skip("Keras is not installed.")
    run("keras_on_gpus", ranks, KERAS_BACKEND="torch")


@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_on_gpus_train_as_one_process(ranks: int):
    run("stages", ranks)


def test_checkpoints_of_gpu_tensors(tmp_path: object):
    run("checkpoints", 2, str(tmp_path))


def test_a_rank_that_waits_for_a_gpu_rank_is_reported():
    outputs = run("late_rank", 2, CARME_HANG_SECONDS="1")
    assert any("has waited for 1 s. Where the ranks are:" in output for output in outputs), outputs
    assert any("in busy_elsewhere" in output for output in outputs), outputs


def test_training_in_less_memory_than_it_needs():
    (output,) = run("less_memory", 1)
    print(output)
