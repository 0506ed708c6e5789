"""Keras 3 with `carme_runtime.keras`, on the backend that KERAS_BACKEND names."""

# Keras and its backends are optional.
# pyright: reportMissingImports=false

import importlib

import keras

import carme_runtime.keras as ck
from carme_runtime.compare.programs import Gradients, Mark, Step, Work
from carme_runtime.compare.programs.keras_networks import build, first_gradients
from carme_runtime.compare.tasks import MOMENTUM

_ON_TORCH = keras.backend.backend() == "torch"
VERSIONS = ("keras", "torch" if _ON_TORCH else "tensorflow")


def prepare(work: Work) -> tuple[Step, Gradients]:
    """The step of one rank, which takes its own share of the batch, and the first one's gradients."""
    library = "torch_networks" if _ON_TORCH else "tensorflow_mirrored"
    importlib.import_module(f"carme_runtime.compare.programs.{library}").set_threads(work.threads)
    inputs, targets = work.task.inputs, work.task.targets
    if _ON_TORCH and inputs.ndim == 5:
        inputs = inputs.transpose(0, 1, 4, 2, 3).copy()
    inputs, targets = work.batches(inputs), work.batches(targets)
    if work.is_bf16:
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    network = build(work.task, keras, channels_first=_ON_TORCH)
    rate = work.task.network.rate
    # user: begin
    model = ck.Model(network)
    model.compile(
        optimizer=keras.optimizers.SGD(rate, momentum=MOMENTUM),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )

    def step(number: int, mark: Mark) -> float:
        model.reset_metrics()
        return float(model.train_on_batch(inputs[number], targets[number]))

    # user: end
    return step, lambda: first_gradients(work.task, network, model.optimizer, channels_first=_ON_TORCH)
