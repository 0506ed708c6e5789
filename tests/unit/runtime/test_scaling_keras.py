"""What a probe of Keras on TensorFlow makes of what it sees, and what of Keras it cannot measure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from carme_runtime import scaling
from carme_runtime.graph import Timing
from carme_runtime.imports import first_in_path
from carme_runtime.scaling import sampling, start
from carme_runtime.scaling.keras_watching import parts, samples_per_s
from carme_runtime.scaling.own_loops import OwnLoop
from patience import HANG


def test_a_whole_step_is_divided_into_its_parts() -> None:
    forward, backward = sampling.split_whole(9.0)
    assert (forward, backward) == (3.0, 6.0)
    assert sampling.split_whole(9.0, 4.0) == (4.0, 5.0)
    assert sampling.split_whole(9.0, 9.5) == (3.0, 6.0), "a forward pass alone that took longer is noise"
    seen = (Timing(8, 2.0, 4.0),)
    # 10 ms for a step: the batch was loaded meanwhile, or the step waited for it.
    assert parts(seen, 10.0, 20.0) == (seen, 4.0, True)
    assert parts(seen, 10.0, 3.0) == (seen, 1.0, False)
    # The step of the script was faster than the same made again.
    scaled, fixed, _ = parts(seen, 3.0, 0.0)
    assert scaled == (Timing(8, 1.0, 2.0),) and fixed == 0.0


def test_the_rate_of_batches_leaves_out_what_was_loaded_before() -> None:
    moments = [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    assert samples_per_s([32] * 7, moments) == pytest.approx(32.0)
    assert samples_per_s([32, 32], [0.0, 1.0, 2.0]) == pytest.approx(32.0)
    assert samples_per_s([32], [0.0, 1.0]) == 0.0


class Optimizer:
    """Counts its steps."""

    def __init__(self) -> None:
        self.iterations = self

    count = 0

    def numpy(self) -> int:
        return self.count


def test_a_single_step_before_fit_is_no_loop_of_its_own() -> None:
    """Such as one that makes an optimizer's variables, before data is loaded for minutes."""
    loop, optimizer = OwnLoop(60.0), Optimizer()
    assert not loop.is_seen
    loop.note(optimizer)
    assert loop.is_seen
    assert not any(loop.goes_on(seconds) for seconds in range(0, 600, 5))
    optimizer.count += 1
    loop.note(optimizer)
    assert not any(loop.goes_on(seconds) for seconds in range(600, 1200, 5)), "nor are two"


@pytest.mark.parametrize(("is_compiled", "pause"), [(False, 1), (True, 1), (True, 20)])
def test_a_loop_that_goes_on_is_noticed_compiled_or_not(is_compiled: bool, pause: int) -> None:
    """Once it has trained for as long as the probe measures; `pause` looks are made between two steps."""
    loop, optimizer = OwnLoop(60.0), Optimizer()
    loop.note(optimizer)
    assert not loop.goes_on(0.0)
    seconds = 0
    for seconds in range(5, 1000, 5):
        if seconds // 5 % pause == 0:
            optimizer.count += is_compiled
            if not is_compiled:
                loop.note(optimizer)
        if loop.goes_on(seconds):
            break
    assert seconds == max(60, 3 * 5 * pause)


def test_steps_of_a_loop_that_has_ended_are_no_reason_to_end_the_script() -> None:
    loop, optimizer = OwnLoop(60.0), Optimizer()
    for seconds in range(30):
        loop.note(optimizer)
        assert not loop.goes_on(seconds)
    assert not any(loop.goes_on(seconds) for seconds in range(31, 600, 5))


KERAS_MODULES = {
    "backend/jax/trainer.py": (
        "from keras.src.optimizers import base_optimizer\n"
        "class JAXTrainer:\n    def make_train_function(self):\n        pass\n"
    ),
    "backend/tensorflow/trainer.py": (
        "from keras.src.optimizers import base_optimizer\n"
        "class TensorFlowTrainer:\n    def make_train_function(self):\n        pass\n"
    ),
    "optimizers/base_optimizer.py": (
        "class Count(int):\n    def numpy(self):\n        return self\n"
        "class BaseOptimizer:\n    iterations = Count(0)\n"
        "    def apply(self, gradients):\n        pass\n"
    ),
}
OTHER_MODULES = {
    "optax.py": "def apply_updates(weights, updates):\n    return weights\n",
    "mxnet/gluon/trainer.py": "class Trainer:\n    def step(self, batch_size):\n        pass\n",
    "tf_keras/src/engine/training.py": (
        "class Model:\n    def make_train_function(self, force=False):\n        pass\n"
    ),
}
FOREVER = "; import threading; threading.Event().wait()"  # only the probe ends it
ON_JAX = "import keras.src.backend.jax.trainer"
TRAINS_ON_JAX = f"from keras.src.backend.jax.trainer import *; JAXTrainer().make_train_function(){FOREVER}"
OWN_LOOP_ON_JAX = f"from {ON_JAX[7:]} import *; base_optimizer.BaseOptimizer().apply([]){FOREVER}"
OWN_LOOP = (
    "import keras.src.backend.tensorflow.trainer\n"
    "from keras.src.optimizers.base_optimizer import *\n"
    "optimizer = BaseOptimizer()\n"
    "optimizer.apply([])"
)
# A compiled loop calls the optimizer when it is traced; then the optimizer counts its steps.
COMPILED_LOOP = f"{OWN_LOOP}\nimport time\nwhile True:\n  time.sleep(0.01)\n" + (
    "  optimizer.iterations = Count(optimizer.iterations + 1)"
)
EAGER_LOOP = f"{OWN_LOOP}\nimport time\nwhile True:\n  time.sleep(0.01)\n  optimizer.apply([])"
OPTAX_ALONE = f"import optax; optax.apply_updates([], []){FOREVER}"
MXNET = "from mxnet.gluon.trainer import Trainer; trainer = Trainer()"
TF_KERAS = "from tf_keras.src.engine.training import Model; model = Model()"


@pytest.mark.parametrize(
    ("script", "code", "sentence"),
    [
        (ON_JAX, 0, ""),
        (TRAINS_ON_JAX, 2, "Keras on JAX cannot be measured: JAX compiles"),
        (OWN_LOOP_ON_JAX, 2, "Keras on JAX cannot be measured: JAX compiles"),
        (f"{ON_JAX}; raise SystemExit('own')", 1, "own"),
        (OWN_LOOP, 2, "The script trains in a loop of its own, and on TensorFlow the probe sees"),
        (COMPILED_LOOP, 2, "The script trains in a loop of its own, and on TensorFlow the probe sees"),
        (EAGER_LOOP, 2, "The script trains in a loop of its own, and on TensorFlow the probe sees"),
        ("import optax", 0, ""),
        (OPTAX_ALONE, 2, "A program of JAX cannot be measured: JAX compiles a step as one program, which"),
        (MXNET, 0, ""),
        (f"{MXNET}; trainer.step(8){FOREVER}", 2, "MXNet cannot be measured: the probe does not know its"),
        (TF_KERAS, 0, ""),
        (
            f"{TF_KERAS}; model.make_train_function(){FOREVER}",
            2,
            "tf_keras, the Keras before Keras 3, cannot",
        ),
        ("import keras.src.backend.tensorflow.trainer", 0, ""),
        ("print('nothing of Keras')", 0, ""),
    ],
)
def test_what_cannot_be_measured_of_keras_is_named(
    tmp_path: Path, script: str, code: int, sentence: str
) -> None:
    """The modules that the probe changes, as a Keras has them."""
    for name, text in (
        {f"keras/src/{name}": text for name, text in KERAS_MODULES.items()} | OTHER_MODULES
    ).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (file.parent, *file.parent.parents):
            if tmp_path in folder.parents:
                (folder / "__init__.py").touch()
        file.write_text(text)
    package = Path(scaling.__file__).parents[2]
    path = first_in_path(f"{tmp_path}{os.pathsep}{package}")
    own = {"PYTHONPATH": path, start.PROBE: str(tmp_path / "scale.json"), start.SECONDS: "0.5"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr and done.stderr.count("--scale-probe:") == (code == 2)
