"""TensorFlow's MultiWorkerMirroredStrategy with tf_keras."""

# TensorFlow is optional.
# pyright: reportMissingImports=false

import tensorflow as tf

from carme_runtime.compare.programs import Gradients, Mark, Step, Work
from carme_runtime.compare.programs.keras_networks import build, first_gradients
from carme_runtime.compare.tasks import MOMENTUM

VERSIONS = ("tensorflow", "tf_keras")


def set_threads(threads: int) -> None:
    """Those of each operation; two operations may run beside each other, as one of them may wait."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)


def prepare(work: Work) -> tuple[Step, Gradients]:
    """The step of one rank, and the first one's gradients."""
    set_threads(work.threads)
    inputs, targets = map(work.batches, work.task.share(work.rank, work.ranks))
    count = work.task.targets[0].size  # over all ranks; of pixels where each has one
    if work.is_bf16:
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    rate = work.task.network.rate
    # user: begin
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build(work.task, tf.keras)
        optimizer = tf.keras.optimizers.SGD(rate, momentum=MOMENTUM)

    def train(x, y):
        with tf.GradientTape() as tape:
            logits = tf.cast(model(x, training=True), tf.float32)
            losses = tf.keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=count)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905 (unknown to TensorFlow)
        return loss

    @tf.function
    def train_everywhere(x, y):
        return strategy.reduce("SUM", strategy.run(train, args=(x, y)), axis=None)

    def step(number: int, mark: Mark) -> float:
        x, y = tf.constant(inputs[number]), tf.constant(targets[number])
        mark("input")
        return float(train_everywhere(x, y))

    # user: end
    return step, lambda: first_gradients(work.task, model, optimizer)
