"""Trains a pipeline of two stages, one of them on a rank that is slowed down: it gets fewer layers.

    uneven.py RANK TIMES

RANK takes TIMES as long for whatever it computes.
"""

import copy
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from pipelined import alike, single_step
from torch import nn
from torch.nn import functional

from carme_runtime.torch import pipeline

LAYERS, WIDTH, SAMPLES, MICRO_BATCHES = 12, 128, 512, 4
_SLICE = 0.005  # seconds of processor time


def slow_down(times: float) -> None:
    """After each slice of its processor time this process computes nothing for as long, and so on.

    So it takes more of the processor's time for the same work, however busy the machine is.
    """
    began = time.process_time()

    def pause(*_: Any) -> None:
        nonlocal began
        now = time.process_time()
        while time.process_time() < now + (times - 1) * (now - began):
            pass
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, _SLICE)

    signal.signal(signal.SIGPROF, pause)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, _SLICE)


def main(slow: int, times: float) -> None:
    dist.init_process_group("carme")
    if dist.get_rank() == slow:
        slow_down(times)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model, inputs = nn.Sequential(*layers), torch.randn(SAMPLES, WIDTH)
    targets = torch.randint(0, WIDTH, (SAMPLES,))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tested, _ = pipeline(
        model, optimizer, example=inputs, stages=2, micro_batches=MICRO_BATCHES, schedule="1f1b"
    )
    loss = tested.step(inputs, targets, loss=functional.cross_entropy)
    alike(loss, single_step(reference, (inputs,), targets, 1, True), "loss")
    known = dict(reference.named_parameters())
    for name, parameter in tested.named_parameters():
        alike(parameter.grad, known[name].grad, name)  # pyright: ignore[reportArgumentType]
    created = tested.plan()
    operators = [stage.operators for stage in created.stages]
    assert operators[slow] < 0.8 * operators[1 - slow], (operators, created.devices)
    speeds = [1 / created.slowness_of(stage) for stage in (0, 1)]
    assert 1.3 < speeds[1 - slow] / speeds[slow] < 2 * times, created.devices
    if dist.get_rank() == 0:
        print(created)
    signal.setitimer(signal.ITIMER_PROF, 0)
    tested.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
