"""What checkpoints take of a model in stages and of its optimizer, and give back: no rank has all of it."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from carme_runtime.checkpoint.stream import pack, unpack
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch.pipeline_run import Run
from carme_runtime.torch.pipeline_start import bytes_of
from carme_runtime.torch.whole_state import on_host

__all__ = ["StageStates", "StageTensor", "note_stages", "stages_of"]


class StageTensor:
    """A tensor that one rank holds, and that all ranks get when they ask for it together.

    Args:
        run: The ranks.
        root: The one that holds it.
        shape, dtype: Known on all ranks.
        content: On `root`: the tensor.
    """

    def __init__(
        self,
        run: Run,
        root: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        content: torch.Tensor | None,
    ) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self._run, self._root, self._content = run, root, content

    def detach(self) -> "StageTensor":
        """Itself: it has no history."""
        return self

    def numel(self) -> int:
        """How many elements it has."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def full_tensor(self) -> torch.Tensor:
        """It, in host memory, on all ranks, which call this together."""
        if self._content is not None:
            content = on_host(self._content)
        else:
            content = torch.empty(self.shape, dtype=self.dtype)
        if self._run.world_group and content.numel():
            self._run.world_group.broadcast(bytes_of(content), self._root, timeout=self._run.timeout)
        return content


@dataclass
class StageStates:
    """The state of a model in stages, and that of its optimizer.

    Args:
        run: The ranks; those of the first pipeline have the numbers of their stages.
        stage: This rank's.
        owners: By first name of a parameter or buffer: the stages that hold it.
        described: By first name: shape and type in the whole model.
        tensors: By first name: the tensors; those of other stages are empty.
        model: All of it.
        optimizer: With this rank's parameters only.
        groups: First names of the parameters in the whole optimizer's groups.
    """

    run: Run
    stage: int
    owners: Mapping[str, Sequence[int]]
    described: Mapping[str, tuple[torch.Size, torch.dtype]]
    tensors: Mapping[str, torch.Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    groups: list[list[str]]

    @cached_property
    def names(self) -> dict[str, str]:
        """By name in the model's state: the first name. Waits for parameters that travel."""
        return _first_names(self.model)

    def take_model(self) -> dict[str, StageTensor]:
        """The model's state. All ranks call it together, and ask for its tensors in one order."""
        return {
            name: self._held(first, *self.described[first], self.tensors[first])
            for name, first in self.names.items()
        }

    def own_of_model(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Of a model's state, or of its structure in a checkpoint: what this rank holds.

        Raises:
            InvalidCall: It is another model's.
        """
        missing = [name for name in self.names if name not in part]
        unknown = [name for name in part if name not in self.names]
        if missing or unknown:
            raise InvalidCall(
                f"The checkpoint lacks {missing[0]}, which the model has."
                if missing
                else f"The checkpoint has {unknown[0]}, which the model lacks.",
                "Build the same model, or give another folder.",
            )
        return {name: part[name] for name, first in self.names.items() if self.stage in self.owners[first]}

    def give_model(self, own: Mapping[str, torch.Tensor]) -> None:
        """Take what `own_of_model` has chosen. All ranks call it together.

        Raises:
            InvalidCall: A tensor has another shape. No rank has changed anything then.
        """
        differing = [name for name in own if own[name].shape != self.described[self.names[name]][0]]
        problem = ""
        if differing:
            shapes = list(own[differing[0]].shape), list(self.described[self.names[differing[0]]][0])
            problem = (
                f"{differing[0]} has the shape {shapes[0]} in the checkpoint, and {shapes[1]} in the model."
            )
        if self.run.minimum(int(not problem)) == 0:
            raise InvalidCall(
                problem or "The checkpoint does not fit the stage of another rank, which says so.",
                "Build the same model, or give another folder.",
            )
        with torch.no_grad():
            for name, content in own.items():
                self.tensors[self.names[name]].copy_(content)

    def take_optimizer(self) -> dict[str, Any]:
        """The optimizer's state as one process has it; see `take_model`."""
        numbers = self._numbers()
        state: dict[int, dict[str, Any]] = {}
        parameters = self._own_parameters()
        for root in sorted({self.owners[name][0] for name in numbers}):
            is_owner = self.run.rank == root == self.stage
            own = {
                number: self.optimizer.state[parameters[name]]
                for name, number in numbers.items()
                if is_owner and self.owners[name][0] == root and parameters[name] in self.optimizer.state
            }
            described = unpack(self.run.broadcast(pack(_described(own)) if is_owner else b"", root))
            for number, entries in described.items():
                state[number] = {
                    key: self._held_by(root, value[1], value[2], own[number][key] if is_owner else None)
                    if value[0] == "tensor"
                    else value[1]
                    for key, value in entries.items()
                }
        return {"state": dict(sorted(state.items())), "param_groups": self._described_groups(numbers)}

    def own_of_optimizer(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Of an optimizer's state, or of its structure in a checkpoint: what this rank holds.

        Raises:
            InvalidCall: It is that of another optimizer.
        """
        saved = [group["params"] for group in part["param_groups"]]
        counts, known = list(map(len, saved)), list(map(len, self.groups))
        if counts != known:
            raise InvalidCall(
                f"The checkpoint's optimizer has groups of {counts} parameters, and this one of {known}.",
                "Make the same optimizer of the same model, or give another folder.",
            )
        own = [
            [number for number, name in zip(numbers, names, strict=True) if self.stage in self.owners[name]]
            for numbers, names in zip(saved, self.groups, strict=True)
        ]
        chosen = {number for numbers in own for number in numbers}
        return {
            "state": {number: entry for number, entry in part["state"].items() if number in chosen},
            "param_groups": [
                {**group, "params": numbers} for group, numbers in zip(part["param_groups"], own, strict=True)
            ],
        }

    def give_optimizer(self, own: dict[str, Any]) -> None:
        """Take what `own_of_optimizer` has chosen."""
        self.optimizer.load_state_dict(own)

    def _numbers(self) -> dict[str, int]:
        """Of the whole optimizer's parameters, by first name."""
        return {name: number for number, name in enumerate(n for names in self.groups for n in names)}

    def _own_parameters(self) -> dict[str, Any]:
        own = [name for names in self.groups for name in names if self.stage in self.owners[name]]
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return dict(zip(own, held, strict=True))

    def _described_groups(self, numbers: Mapping[str, int]) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [numbers[name] for name in names]}
            for group, names in zip(self.optimizer.param_groups, self.groups, strict=True)
        ]

    def _held(
        self, first: str, shape: Sequence[int], dtype: torch.dtype, content: torch.Tensor
    ) -> StageTensor:
        root = self.owners[first][0]
        return self._held_by(root, shape, dtype, content if self.run.rank == root == self.stage else None)

    def _held_by(
        self, root: int, shape: Sequence[int], dtype: torch.dtype, content: torch.Tensor | None
    ) -> StageTensor:
        return StageTensor(self.run, root, shape, dtype, content)


def _described(state: dict[int, dict[str, Any]]) -> dict[int, dict[str, tuple[Any, ...]]]:
    """What other ranks must know of an optimizer's state before they ask for its tensors."""
    return {
        number: {
            key: ("tensor", list(value.shape), value.dtype)
            if isinstance(value, torch.Tensor)
            else ("value", value)
            for key, value in entries.items()
        }
        for number, entries in state.items()
    }


def _first_names(model: nn.Module) -> dict[str, str]:
    """By name in a model's state: the first name of the parameter or buffer."""
    first = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    known = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return {name: first[id(known[name])] for name in model.state_dict()}


# Not the optimizers' own: these states hold them.
_stages: "weakref.WeakKeyDictionary[Any, weakref.ref[StageStates]]" = weakref.WeakKeyDictionary()


def note_stages(states: StageStates) -> None:
    """Checkpoints of its optimizer are those of these stages, as long as somebody holds `states`."""
    _stages[states.optimizer] = weakref.ref(states)


def stages_of(optimizer: Any) -> StageStates | None:
    """The stages whose parameters an optimizer has; None: it has no part of a pipeline."""
    reference = _stages.get(optimizer)
    return reference() if reference else None
