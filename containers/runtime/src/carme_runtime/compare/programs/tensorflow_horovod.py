"""TensorFlow with Horovod's calls, on a model of tf_keras."""

# TensorFlow and Horovod are optional.
# pyright: reportMissingImports=false

import horovod.tensorflow as hvd
import tensorflow as tf

from carme_runtime.compare.programs import Gradients, Mark, Step, Work
from carme_runtime.compare.programs.keras_networks import build, first_gradients
from carme_runtime.compare.programs.tensorflow_mirrored import set_threads
from carme_runtime.compare.tasks import MOMENTUM

VERSIONS = ("tensorflow", "tf_keras", "horovod")


def prepare(work: Work) -> tuple[Step, Gradients]:
    """The step of one rank, and the first one's gradients."""
    set_threads(work.threads)
    inputs, targets = map(work.batches, work.task.share(work.rank, work.ranks))
    if work.is_bf16:
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model, rate = build(work.task, tf.keras), work.task.network.rate
    # user: begin
    hvd.init()
    optimizer = tf.keras.optimizers.SGD(rate, momentum=MOMENTUM)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd.broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, tf.cast(model(x, training=True), tf.float32))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905 (unknown to TensorFlow)
        return loss

    def step(number: int, mark: Mark) -> float:
        x, y = tf.constant(inputs[number]), tf.constant(targets[number])
        mark("input")
        return float(train(x, y))

    # user: end
    return step, lambda: first_gradients(work.task, model, optimizer)
