"""Runs the messages of pipelines, without models, with random delays: mailboxes.py RUNS

Schedules, micro-batches, skips over stages and delays are drawn for each run. Every message holds numbers
that its receiver knows. Half of the mailboxes are closed, the others let go of while messages may still
arrive.
"""

import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy

from carme_runtime import gaspi
from carme_runtime.collectives.mailboxes import Box, Mailboxes, free_dropped
from carme_runtime.pipeline import KINDS, chain, make, slots_needed
from carme_runtime.pipeline.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action

SIZES = (0, 8, 1000, 70_000)


class Pipeline:
    """One pipeline's messages.

    Args:
        process: This rank.
        seed: The same on all ranks.
    """

    def __init__(self, process: gaspi.Process, group: Any, seed: int) -> None:
        choice = random.Random(seed)
        name = choice.choice(list(KINDS))
        micro_batches = choice.randrange(1, 4) * (process.size if KINDS[name].multiple_of_ranks else 2)
        self.schedule, self.seed = make(name, process.size, micro_batches), seed
        pieces = len(self.schedule.holders)
        skips = {(a, choice.randrange(a + 1, pieces)) for a in range(pieces - 1)}
        holders = self.schedule.holders
        every = sorted({*chain(pieces), *skips})
        slots = slots_needed(self.schedule, every)
        self.channels = [(a, b) for a, b in every if holders[a] != holders[b]]
        boxes = {}
        for a, b in self.channels:
            size = 16 + choice.choice(SIZES)
            boxes[a, b, False] = Box(holders[a], holders[b], slots[a, b], size)
            boxes[a, b, True] = Box(holders[b], holders[a], slots[a, b], size)
        self.boxes, self.described = Mailboxes(process._context, group, boxes, 60_000), boxes
        self.delays = random.Random(f"{seed} {process.rank}")
        self.held: dict[tuple[int, int], list[tuple[Any, int]]] = {}

    def act(self, action: Action) -> None:
        """What a stage sends and receives in one action."""
        time.sleep(self.delays.choice((0, 0, 0.0005)) * self.delays.random())
        piece, micro = action.piece, action.micro
        if action.kind == FORWARD:
            came = [(a, b, False) for a, b in self.channels if b == piece]
            self.held[piece, micro] = [(name, self.take(name, micro)) for name in came]
            self.send([(a, b, False) for a, b in self.channels if a == piece], micro)
        if action.kind in (BACKWARD, INPUTS):
            for name in [(a, b, True) for a, b in self.channels if a == piece]:
                self.boxes.give_up(name, self.take(name, micro))
            self.send([(a, b, True) for a, b in self.channels if b == piece], micro)
        if action.kind in (BACKWARD, WEIGHTS):
            for name, number in self.held.pop((piece, micro)):
                self.boxes.give_up(name, number)

    def evaluate(self, rank: int) -> None:
        """Forward passes alone, after all else has arrived: the last stage only gives slots up."""
        self.boxes.flush()
        own = [piece for piece, holder in enumerate(self.schedule.holders) if holder == rank]
        for micro, piece in itertools.product(range(self.schedule.micro_batches), own):
            for name in [(a, b, False) for a, b in self.channels if b == piece]:
                self.boxes.give_up(name, self.take(name, micro))
            self.send([(a, b, False) for a, b in self.channels if a == piece], micro)

    def send(self, names: list[Any], micro: int) -> None:
        for name in names:
            memory = self.boxes.slot(name)
            size = self.described[name].size
            memory[:16].view(numpy.int64)[:] = self.seed, micro
            memory[16:size] = micro % 251
            self.boxes.put(name, size)

    def take(self, name: Any, micro: int) -> int:
        memory, number = self.boxes.take(name)
        assert memory[:16].view(numpy.int64).tolist() == [self.seed, micro], (name, micro)
        assert (memory[16 : self.described[name].size] == micro % 251).all(), (name, micro)
        return number


with gaspi.init() as process:
    group = process.group(range(process.size))
    for run in range(int(sys.argv[1])):
        pipeline = Pipeline(process, group, run)
        for _ in range(2):  # the second step uses slots that the first one gave up
            for action in pipeline.schedule.actions[process.rank]:
                pipeline.act(action)
        if run % 3 == 0:
            pipeline.evaluate(process.rank)
        if run % 2:
            pipeline.boxes.close()
        del pipeline
        free_dropped(process._context, group, 60_000)
    held = Path("/proc/self/maps").read_text().count("memfd:carme-segment")
    assert held < 10 * process.size, f"{held} segments are mapped"
