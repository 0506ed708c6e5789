"""MXNet with Gluon's Trainer; the setting is the key-value store, whose servers step the optimizer."""

# MXNet is optional.
# pyright: reportMissingImports=false

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.contrib import amp

from carme_runtime.compare.programs import Gradients, Mark, Step, Work
from carme_runtime.compare.programs.mxnet_networks import build, first_gradients, prepare_inputs
from carme_runtime.compare.tasks import MOMENTUM

VERSIONS = ("mxnet", "numpy")
FROM_WEIGHTS = True  # servers step the optimizer, so ranks never see the gradients over all of them


def prepare(work: Work) -> tuple[Step, Gradients]:
    """The step of one rank, and the first one's gradients."""
    if work.is_bf16:
        amp.init("bfloat16")
    inputs, targets = work.task.share(work.rank, work.ranks)
    inputs, targets = work.batches(prepare_inputs(inputs)), work.batches(targets)
    model, rate, batch, kind = build(work.task), work.task.network.rate, work.task.batch, work.setting
    # user: begin
    store = mx.kv.create(kind)
    model.hybridize(static_alloc=True, static_shape=True)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    optimizer = mx.optimizer.SGD(learning_rate=rate, momentum=MOMENTUM)
    trainer = gluon.Trainer(model.collect_params(), optimizer, kvstore=store)

    def step(number: int, mark: Mark) -> float:
        x, y = mx.nd.array(inputs[number]), mx.nd.array(targets[number])
        mark("input")
        with autograd.record():
            losses = loss_of(model(x), y)
        losses.backward()
        trainer.step(batch)
        return float(losses.mean().asscalar())

    # user: end
    return step, lambda: first_gradients(work.task, model)


def settle() -> None:
    """Wait for the gradients of the last step to be sent and the new weights to come."""
    mx.nd.waitall()
