"""Lightning, transformers and Accelerate over the `carme` backend, in scripts that do not know of it."""

import re

import pytest


def told(ranks):
    """The backend, and what the model became."""
    found = re.search(r"BACKEND (\w+)\nRESULT (\w+)", ranks.outputs[0])
    assert found, ranks.said()
    return found[1], found[2]


@pytest.mark.timeout(480)  # as in test_torch.py
@pytest.mark.parametrize("how", ["lightning", "trainer", "accelerate"])
def test_scripts_as_they_are_train_as_on_gloo(launcher, how):
    gloo = told(launcher.run("libraries", [0, 0], how))
    launcher.variables["CARME_TORCH_BACKEND"] = "carme"
    assert (told(launcher.run("libraries", [0, 0], how)), gloo[0]) == (("carme", gloo[1]), "gloo")


def test_lightning_with_the_backend_by_name(launcher):
    assert told(launcher.run("libraries", [0, 0], "lightning_named"))[0] == "carme"


def test_a_backend_that_does_not_exist_is_named(launcher):
    launcher.variables["CARME_TORCH_BACKEND"] = "crame"
    ranks = launcher.start("libraries", [0, 0], "accelerate")
    assert all(ranks.finish()), ranks.said()
    assert "CARME_TORCH_BACKEND=crame is no backend of torch.distributed." in ranks.outputs[0]
