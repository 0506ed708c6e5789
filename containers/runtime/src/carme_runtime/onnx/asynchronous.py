"""Asynchronous training: ranks wait for a slower one only where its weights would be older than a bound.

Each rank has the weights. It draws the next part of a batch, steps on it with an optimizer of its own, and
writes what the step has changed into the memory of all other ranks, which add it between two steps of theirs.
Changes are added, so the ranks have the same weights, up to rounding, whatever order they come in. A rank
that is slow draws fewer parts.

The bound is that of Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server" (NIPS 2013), over changes instead of clocks: so many of another rank's changes may wait here, and who
would add one more waits. The compensation of gradients for what the others have changed meanwhile is that of
Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (ICML 2017).
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from carme_runtime.collectives.errors import Timeout
from carme_runtime.collectives.group import Group
from carme_runtime.collectives.mailboxes import Box, Counter, Mailboxes
from carme_runtime.torch import messages

#: Milliseconds between two looks for others' changes, while this rank waits for something.
_POLL_MS = 5
#: In a message: the number of the part, its share of the batch's loss, and what each weight changes by.
_NUMBERS = 2
_END = -1


def room_for(staleness: int, ranks: int) -> int:
    """How many changes of each other rank may wait on a rank.

    Args:
        staleness: Steps of all ranks, of as many changes as there are ranks, that weights may be behind.
        ranks: How many there are.
    """
    return max(staleness * ranks // (ranks - 1), 1)


class Exchange:
    """This rank's weights, and what the ranks change in them.

    Args:
        context: The transport's.
        group: All ranks, for no other use meanwhile.
        parameters: What is trained.
        staleness: See `room_for`.
        timeout: Milliseconds after which waiting is given up; -1: never.

    Attributes:
        losses: By the number of a part: its share of the mean loss of its batch.
        added: How many changes of others have been added.
        most_behind: How many changes of others a change of this rank's did not know, at most.
    """

    def __init__(
        self, context: Any, group: Group, parameters: list[torch.nn.Parameter], staleness: int, timeout: int
    ) -> None:
        self._parameters, self._timeout = parameters, timeout
        self._rank = group.ranks[group.index]
        self._peers = [rank for rank in group.ranks if rank != self._rank]
        sizes = [each.numel() * each.element_size() for each in parameters]
        size, slots = messages.room([0, 8, *sizes]), room_for(staleness, group.size)
        boxes: dict[tuple[int, int], Box] = {}
        for source in group.ranks:
            first = None
            for target in group.ranks:
                if target != source:
                    boxes[source, target] = Box(source, target, slots, size, like=first)
                    first = first or (source, target)
        self._boxes = Mailboxes(context, group, boxes, timeout)
        self._ended: set[int] = set()
        self._slots = slots
        self.losses: dict[int, float] = {}
        self.added = self.most_behind = 0

    def add_arrived(self) -> bool:
        """Add what has come from the others, and has room at once; whether something had."""
        came = False
        for rank in self._peers:
            for _ in range(self._slots):
                if rank in self._ended or not self._boxes.is_there((rank, self._rank)):
                    break
                self._add_change_of(rank)
                came = True
        return came

    def send(self, number: int, loss: float, changes: list[torch.Tensor] | None) -> None:
        """Let all others add a change, when each of them has room for it.

        Args:
            number: Of the part.
            loss: Its share of the mean loss of its batch.
            changes: Of each parameter; None: of none.
        """
        if number != _END:
            self.losses[number] = loss
        for rank in self._peers:
            self._until(
                lambda wait, rank=rank: self._boxes.is_free((self._rank, rank), wait),
                f"rank {rank} adds a change",
            )
        no_changes = [None] * len(self._parameters)
        parts = [number, torch.tensor(loss, dtype=torch.float64), *(changes or no_changes)]
        # Nobody reads the slot any more in which it is put together: all others had given it up.
        slots = [self._boxes.slot((self._rank, rank)) for rank in self._peers]
        size = messages.pack(slots[0], parts, "a change of the weights")
        for rank in self._peers:
            self._boxes.put((self._rank, rank), size)

    def end(self) -> None:
        """Add what is still on its way: then all ranks have the same weights, up to rounding."""
        self.send(_END, 0.0, None)
        for rank in self._peers:
            self._until(
                lambda wait, rank=rank: rank in self._ended or self._boxes.is_there((rank, self._rank), wait),
                f"rank {rank} ends its training",
                over=lambda rank=rank: rank in self._ended,
            )
        self._boxes.flush()

    def close(self) -> None:
        """Give up the memory, when all ranks have come here."""
        self._boxes.close()

    def _until(
        self, condition: Callable[[int], bool], event: str, over: Callable[[], bool] | None = None
    ) -> None:
        """Add the others' changes until something holds: a rank that waits may be waited for as well."""
        began = time.monotonic()
        while True:
            holds = condition(0 if self.add_arrived() else _POLL_MS)
            if over() if over else holds:
                return
            if 0 <= self._timeout <= 1000 * (time.monotonic() - began):
                raise Timeout(f"It took too long until {event}.", "See what that rank does.")

    def _add_change_of(self, rank: int) -> None:
        memory, number = self._boxes.take((rank, self._rank))
        part, loss, *changes = messages.unpack(memory, _NUMBERS + len(self._parameters))
        if part == _END:
            self._ended.add(rank)
        else:
            self.losses[part] = float(loss)
            self.added += 1
            with torch.no_grad():
                for parameter, change in zip(self._parameters, changes, strict=True):
                    if change is not None:
                        parameter.add_(change)
        self._boxes.give_up((rank, self._rank), number)


def train(
    exchange: Exchange,
    counter: Counter,
    parts: Callable[[int], tuple[Any, float] | None],
    loss_of: Callable[[Any], torch.Tensor],
    parameters: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    compensation: float,
) -> None:
    """Train on parts of batches until there are none.

    Args:
        exchange: With the other ranks.
        counter: Gives each part to one rank.
        parts: By number: a part and its share of the batch's samples; None: there is no such part.
        loss_of: The mean loss over a part.
        parameters: What is trained.
        optimizer: Of this rank.
        compensation: Zheng et al.'s lambda; 0: gradients are taken as they are.
    """
    while (found := parts(number := counter.draw())) is not None:
        part, share = found
        exchange.add_arrived()
        if not share:
            exchange.send(number, 0.0, None)  # a batch of fewer samples than there are ranks
            continue
        known = exchange.added
        before = [each.detach().clone() for each in parameters] if compensation else []
        optimizer.zero_grad()
        loss = loss_of(part)
        loss.backward()
        exchange.add_arrived()
        exchange.most_behind = max(exchange.most_behind, exchange.added - known)
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=False):
                if parameter.grad is not None:
                    parameter.grad += compensation * parameter.grad.square() * (parameter - old)
            old_weights = [each.detach().clone() for each in parameters]
            optimizer.step()
            changes = []
            for parameter, old in zip(parameters, old_weights, strict=True):
                # A part changes as much as its samples are of a batch.
                change = (parameter - old).mul_(share)
                parameter.copy_(old).add_(change)
                changes.append(change)
        exchange.send(number, float(loss.detach()) * share, changes)
    exchange.end()


def numbered(batches: Iterator[Any], ranks: int, cut: Callable[[Any, int, int], tuple[Any, float]]) -> Any:
    """Parts by number, for numbers that grow: part k of batch b has the number b * ranks + k.

    Args:
        batches: In the order that all ranks see.
        ranks: Parts of a batch.
        cut: Gives part k of so many of a batch, and its share of the samples.
    """
    at, batch = -1, None

    def part(number: int) -> tuple[Any, float] | None:
        nonlocal at, batch
        while at < number // ranks:
            batch = next(batches, None)
            at += 1
            if batch is None:
                return None
        return cut(batch, number % ranks, ranks)

    return part
