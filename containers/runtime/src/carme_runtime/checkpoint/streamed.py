"""A checkpoint that rank 0 alone reads, and that travels to the other ranks while they begin to use it.

Models of PyTorch get each parameter when their first forward pass needs it (see `carme_runtime.torch`'s
Arrivals), and optimizers their state before the first step. Whatever else there is waits for its tensors.
"""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from carme_runtime.checkpoint import states
from carme_runtime.checkpoint.ranks import Ranks
from carme_runtime.checkpoint.stream import Layout, Stream, numbers_in, unpack, with_tensors
from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.logs import log

__all__ = ["Arriving", "carrier_of", "first_of", "give", "settle_optimizer"]

_PIECE = 1 << 20  # bytes with which a message is full; a larger tensor is one message


def carrier_of(ranks: Ranks) -> tuple[Group, int]:
    """What carries a checkpoint. Raises InvalidCall where the core does not join the ranks."""
    found = ranks.carrier()
    if found is None:
        raise InvalidCall(
            "A checkpoint cannot be streamed: another library than the runtime's core joins the ranks.",
            "Begin with init_process_group('carme') or parallelize, or leave start out.",
        )
    return found


class Arriving:
    """The tensors of a checkpoint on their way from rank 0. All ranks make it together.

    Args:
        ranks: They are several.
        carrier: Of `carrier_of`.
        held: On rank 0 what was read. None on the others.
        first: Gives, on rank 0, the numbers of the tensors that travel before all others.
    """

    def __init__(
        self,
        ranks: Ranks,
        carrier: tuple[Group, int],
        held: Stream | None,
        first: Callable[[Any], list[int]],
    ) -> None:
        known = None
        if held:
            layout = held.layout
            known = held.packed, layout.tensors, layout.size, first(unpack(held.packed))
        packed, tensors, size, early = ranks.exchange(known)[0]
        self.layout = Layout(tensors, size)
        self.structure = unpack(packed)
        self._bytes = held.content if held else np.empty(size, np.uint8)
        self.is_source = ranks.rank == 0  # this rank has them already
        self._piece_of: dict[int, int] = {}
        self._arrived = 0  # pieces
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._group, limit = carrier  # which must be there until all has arrived
        in_flight = [
            self._group.broadcast(self._bytes[begin:end], 0, timeout=limit, asynchronous=True)
            for begin, end in self._pieces(early)
        ]
        # Not a daemon: a rank that ends early still takes part in what travels.
        threading.Thread(target=self._arrive, args=(in_flight,), name="carme-checkpoint").start()

    def _pieces(self, early: list[int]) -> list[tuple[int, int]]:
        """Ranges of the bytes in the order in which they travel; notes in which each tensor is."""
        known = set(early)
        order = [*early, *(n for n in range(len(self.layout.tensors)) if n not in known)]
        ends = [*(begin for _, _, begin in self.layout.tensors), self.layout.size]
        pieces: list[tuple[int, int]] = []
        for number in order:
            begin, end = ends[number], ends[number + 1]
            last = pieces[-1] if pieces else (0, 0)
            if pieces and last[1] == begin and last[1] - last[0] < _PIECE:
                pieces[-1] = (last[0], end)
            elif end > begin:
                pieces.append((begin, end))
            self._piece_of[number] = len(pieces) - 1
        return pieces

    def _arrive(self, in_flight: list[Any]) -> None:
        try:
            for pending in in_flight:
                if pending:
                    pending.wait()
                with self._changed:
                    self._arrived += 1
                    self._changed.notify_all()
        except BaseException as error:
            # Rank 0 waits for nothing, so nobody raises it there.
            log.warning("A checkpoint did not reach all ranks: %s: %s", type(error).__name__, error)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Wait until these tensors are there. Raises what went wrong on their way."""
        if self.is_source:
            return
        due = max((self._piece_of[number] for number in numbers), default=-1) + 1
        with self._changed:
            self._changed.wait_for(lambda: self._arrived >= due or self._error is not None)
            if self._arrived < due and self._error is not None:
                raise self._error

    def wait_all(self) -> None:
        """Wait for all tensors."""
        self.wait_for(self._piece_of)

    def part(self, structure: Any) -> Any:
        """A part of the structure with its tensors, when they are there."""
        self.wait_for(numbers_in(structure))
        return with_tensors(structure, self.layout, self._bytes)

    def early(self, structure: Any) -> Any:
        """The same at once: its tensors are views of memory that fills by and by."""
        return with_tensors(structure, self.layout, self._bytes, copies=False)


def give(name: str, target: Any, structure: Any, arriving: Arriving, all_parts: Iterable[Any]) -> None:
    """Let a part of the script's state have its part of the checkpoint, by and by where that can be."""
    structure = states.own(target, structure)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.nn.Module) and not hasattr(target, "give_state"):
        _give_model(name, target, structure, arriving, all_parts)
        return
    is_optimizer = torch is not None and isinstance(target, torch.optim.Optimizer)
    if is_optimizer and not arriving.is_source and _loads_as_usual(target):
        _Later(target, structure, arriving)
        return
    states.give(name, target, arriving.part(structure), all_parts)


def first_of(targets: dict[str, Any], structure: Any) -> list[int]:
    """The numbers of the tensors that are needed at once: of values, and buffers of models."""
    found = numbers_in([part for name, part in structure.items() if name not in targets])
    for name, target in targets.items():
        if hasattr(target, "named_buffers") and isinstance(structure.get(name), dict):
            entries = (structure[name].get(key) for key, _ in target.named_buffers(remove_duplicate=False))
            found += [number for entry in entries for number in numbers_in(entry)]
    return list(dict.fromkeys(found))


def _give_model(name: str, model: Any, structure: Any, arriving: Arriving, all_parts: Iterable[Any]) -> None:
    import torch

    from carme_runtime.torch.arrivals import Arrivals, note_arrivals

    if arriving.is_source or not (places := _places(model, structure, arriving.layout)):
        states.give(name, model, arriving.part(structure), all_parts)
        note_arrivals(model, Arrivals(model, once=True))
        return
    state = arriving.early(structure)
    model.load_state_dict(state)  # checks names and shapes; the values come by and by
    arrivals = Arrivals(model, once=True)

    def fetch(number: int, target: torch.Tensor, view: torch.Tensor) -> None:
        arriving.wait_for([number])
        with torch.no_grad():
            target.detach().copy_(view)

    for key, (number, target) in places.items():
        arrivals.travel([target], functools.partial(fetch, number, target, state[key]))
    note_arrivals(model, arrivals)


def _places(model: Any, structure: Any, layout: Layout) -> dict[str, tuple[int, Any]]:
    """By name in the checkpoint, the number of a tensor and what it belongs into; empty: not plain."""
    import torch

    targets: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    targets |= dict(model.named_buffers(remove_duplicate=False))
    found = {}
    for key, entry in structure.items() if isinstance(structure, dict) else ():
        numbers = numbers_in(entry)
        target = targets.get(key)
        if not numbers:
            continue
        if len(numbers) > 1 or target is None or type(target) not in (torch.Tensor, torch.nn.Parameter):
            return {}
        if tuple(layout.tensors[numbers[0]][0]) != tuple(target.shape):
            return {}  # which load_state_dict refuses
        found[key] = numbers[0], target
    return found


def _loads_as_usual(optimizer: Any) -> bool:
    """Whether state is loaded as PyTorch does it: not cut into parts of ranks, nor wrapped."""
    import torch

    plain = torch.optim.Optimizer
    kind = type(optimizer)
    wrapped = kind.load_state_dict is not plain.load_state_dict or kind.state_dict is not plain.state_dict
    return not wrapped and not states.is_spread(optimizer)


class _Later:
    """The state of an optimizer, which it gets before it is used; its settings it has at once."""

    def __init__(self, optimizer: Any, structure: Any, arriving: Arriving) -> None:
        settings = arriving.part(structure["param_groups"])
        optimizer.load_state_dict({"state": {}, "param_groups": settings})
        self._due: tuple[Any, Arriving] | None = structure, arriving
        # They stay: PyTorch goes through its hooks while it calls them.
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_state_dict_pre_hook(self._before)
        optimizer.register_load_state_dict_pre_hook(self._forget)
        _later[optimizer] = self

    def settle(self, optimizer: Any) -> None:
        """Wait for the state, and give it."""
        if self._due is None:
            return
        structure, arriving = self._due
        state = arriving.part(structure)
        self._due = None
        options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        for group, changed in zip(optimizer.param_groups, options, strict=True):
            group |= changed  # a scheduler may have begun meanwhile

    def _before(self, optimizer: Any, *_: Any) -> None:
        self.settle(optimizer)

    def _forget(self, *_: Any) -> None:
        self._due = None  # another state takes its place


_later: "weakref.WeakKeyDictionary[Any, _Later]" = weakref.WeakKeyDictionary()


def settle_optimizer(optimizer: Any) -> None:
    """Wait for the state of an optimizer that still travels, if there is any."""
    if optimizer in _later:  # which may be no optimizer at all: that is refused elsewhere
        _later[optimizer].settle(optimizer)
