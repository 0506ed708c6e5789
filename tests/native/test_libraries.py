"""Lightning, transformers and Accelerate over the `carme` backend, in scripts that do not know of it."""

import re

import pytest

from patience import HANG


def results_of(ranks):
    """The backend, and what the model became."""
    found = re.search(r"BACKEND (\w+)\nRESULT (\w+)", ranks.outputs[0])
    assert found, ranks.output()
    return found[1], found[2]


LIMIT = 4 * HANG  # seconds, for libraries that take long to import on a busy machine


def run(launcher, how):
    ranks = launcher.start("libraries", [0, 0], how)
    assert ranks.finish(LIMIT) == [0, 0], ranks.output()
    return results_of(ranks)


def run_on_gloo(launcher, how):
    ranks = launcher.start("libraries", [0, 0], how)
    ranks.finish(LIMIT)  # at whose end PyTorch aborts a rank now and then, when all is done
    return results_of(ranks)


@pytest.mark.timeout(2 * LIMIT + 60)
@pytest.mark.parametrize("how", ["lightning", "trainer", "accelerate"])
def test_scripts_as_they_are_train_as_on_gloo(launcher, how):
    gloo = run_on_gloo(launcher, how)
    launcher.variables["CARME_TORCH_BACKEND"] = "carme"
    assert (run(launcher, how), gloo[0]) == (("carme", gloo[1]), "gloo")


@pytest.mark.timeout(LIMIT + 60)
def test_lightning_with_the_backend_by_name(launcher):
    assert run(launcher, "lightning_named")[0] == "carme"


@pytest.mark.timeout(LIMIT + 60)
def test_a_backend_that_does_not_exist_is_named(launcher):
    launcher.variables["CARME_TORCH_BACKEND"] = "crame"
    ranks = launcher.start("libraries", [0, 0], "accelerate")
    assert all(ranks.finish(LIMIT)), ranks.output()
    assert "CARME_TORCH_BACKEND=crame is not a backend of torch.distributed." in ranks.outputs[0]
