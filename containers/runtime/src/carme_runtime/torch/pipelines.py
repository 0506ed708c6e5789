"""Pipelines over the ranks of a run: each holds some layers, and micro-batches pass through all of them."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from carme_runtime import strategies
from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.graph import Graph
from carme_runtime.logs import log
from carme_runtime.out_of_core import leave_recomputation
from carme_runtime.out_of_core.sizes import parse_size
from carme_runtime.pipeline import Plan, PlanError, Request, plan
from carme_runtime.starts import STREAMED, check_start
from carme_runtime.torch.arrivals import Arrivals, settle_arrivals, settle_optimizer
from carme_runtime.torch.calls import Called, connected
from carme_runtime.torch.clipping import forget_clipping, norm_of_stages, watch_clipping
from carme_runtime.torch.passes import Passes
from carme_runtime.torch.pieces import batch_norms, defer_statistics, opaque_batch_norms, other_random
from carme_runtime.torch.pipeline_memory import (
    devices_of,
    disk_of,
    free_memory,
    save_memory,
    spare_memory,
    state_factor,
)
from carme_runtime.torch.pipeline_run import Run
from carme_runtime.torch.pipeline_start import bytes_of, check_arguments, send_buffers, send_parameters
from carme_runtime.torch.pipeline_sums import allreduce, refuse_sparse, sum_gradients
from carme_runtime.torch.recomputing import can_recompute
from carme_runtime.torch.stage_states import StageStates, note_stages
from carme_runtime.torch.traced import Traced
from carme_runtime.torch.tracing import capture, example_tensors
from carme_runtime.torch.whole_state import mismatch, named_groups, on_host, whole_optimizer_state

_STEP_COUNT = 50
# How names of BatchNorm's statistics end, in PyTorch and in Keras.
_RUNNING = ("running_mean", "running_var", "moving_mean", "moving_variance")


def pipeline(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    example: torch.Tensor | Sequence[torch.Tensor],
    stages: int | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    memory: str | int | None = None,
    strategy: str | None = None,
    batch_norm: str | None = None,
    cut_points: Sequence[str] = (),
    whole_layers: Sequence[str] = (),
    graph: Graph | None = None,
    whole_batch: bool = False,
    start: str = "",
    variable_shapes: bool = False,
) -> tuple["Pipeline", torch.optim.Optimizer]:
    """Train `model` as a pipeline over all ranks of the run: each rank computes some of its layers.

        model, optimizer = pipeline(model, optimizer, example=inputs)
        loss = model.step(inputs, targets, loss=torch.nn.functional.cross_entropy)    # see `Pipeline`

    Rank 0 traces and measures the model, which is cut into stages that take about the same time; slower ranks
    get smaller ones. Each rank keeps the parameters of its own stage only, and so does its optimizer. All
    begin with rank 0's parameters. Ranks 0 to `stages` - 1 are the first pipeline, the others replicas of it.

    Args:
        model: The same on all ranks, in training, on the host or on this rank's GPU.
        optimizer: Over parameters of this model.
        example: What the model is called with, as large as the largest batch of a replica.
        stages: Ranks of one pipeline. Default: chosen by prediction.
        micro_batches: How many parts a batch is divided into. Default: chosen by prediction.
        schedule: `gpipe`, `1f1b`, `interleaved`, `zb1p` or `zbv`. Default: `1f1b`.
        memory: The most that a stage may need, in bytes or such as "10GiB"; to fit, it may compute forward
            passes again. Default: each rank's share of what is free of the job's limit.
        strategy: `data`: the whole model on each rank; `pipeline`: one pipeline of all; `hybrid`: several;
            `auto` (default): the fastest that fits, by prediction. `carme-run --strategy` overrides it.
        batch_norm: How BatchNorm treats micro-batches: `micro` (default; it warns), `deferred` or `exact`.
        cut_points: Names of layers with which stages begin, in place of those that are best by prediction.
        whole_layers: Names of layers that are not traced into.
        graph: Of this model, measured before (see `trace`), in place of measuring it now.
        whole_batch: Whether the example is a batch of all replicas together.
        start: "streamed": return while rank 0's parameters are still being sent; the first forward pass waits
            for each. Until then use them by the pipeline's calls, `state_dict` and `load_state_dict` only.
        variable_shapes: Whether inputs may be smaller than the example where dimensions are left open.

    Raises:
        InvalidCall: An argument is invalid, or the model cannot be traced.
        PlanError: No plan fits the arguments; the message names the nearest one that works.
        Mismatch: The ranks have different models.
    """
    _prepare(model, optimizer, start)
    run, points = Run(), tuple(cut_points)
    request = Request(run.size, 0, stages, micro_batches, schedule, cut_points=points, whole=whole_batch)
    requested = _Requested(request, memory, strategy, batch_norm, tuple(whole_layers), graph, variable_shapes)
    traced, planned = _planned_or_ended(model, optimizer, example, requested, run)
    return Pipeline(traced, planned, optimizer, run, start == STREAMED), optimizer


def _prepare(model: nn.Module, optimizer: torch.optim.Optimizer, start: str) -> None:
    """Check `start`, and end what would disturb a pipeline. Raises InvalidCall."""
    check_start(start)
    settle_arrivals(model)
    settle_optimizer(optimizer)
    strategies.follow()
    leave_recomputation()


@dataclasses.dataclass(frozen=True)
class _Requested:
    """Arguments of `pipeline`."""

    request: Request
    memory: str | int | None
    strategy: str | None
    batch_norm: str | None
    whole_layers: tuple[str, ...]
    graph: Graph | None
    variable_shapes: bool


def _planned_or_ended(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example: torch.Tensor | Sequence[torch.Tensor],
    requested: _Requested,
    run: Run,
) -> tuple[Traced, Plan]:
    """What `_planned` returns; `carme-run --plan` ends the script with it, or with why there is none."""
    try:
        traced, planned = _planned(model, optimizer, example_tensors(example), requested, run)
    except PlanError as error:
        if strategies.plans_only():  # an error of one rank alone stays its own
            strategies.refuse_plan(error, run.rank)
        raise
    if strategies.plans_only():
        strategies.show_plan(str(planned), run.rank)
    return traced, planned


def _planned(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: tuple[torch.Tensor, ...],
    requested: _Requested,
    run: Run,
) -> tuple[Traced, Plan]:
    """Trace, measure and cut the model. Raises what `pipeline` does."""
    check_arguments(model, optimizer, inputs, requested.batch_norm)
    strategy = strategies.chosen_strategy(requested.strategy)
    limit = parse_size(requested.memory) if requested.memory is not None else None
    traced = capture(model, inputs, requested.whole_layers, requested.variable_shapes)
    samples, micro_batches = len(inputs[0]), requested.request.micro_batches
    smallest = -(-samples // micro_batches) if micro_batches and micro_batches > 1 else max(samples // 8, 1)
    sizes = (smallest, samples)
    traced.graph = run.agreed(traced, inputs, requested.graph, sizes, lambda: spare_memory(model, run))
    run.check_settings(traced, optimizer)
    memories = [limit] * run.size if limit else free_memory(model, run)
    request = dataclasses.replace(
        requested.request,
        samples=samples,
        memory=min(memories) or None,
        state_factor=state_factor(optimizer),
        batch_norm=requested.batch_norm or "",
        strategy=strategy,
        may_recompute=can_recompute(traced),
        disk=disk_of(run),
        devices=devices_of(run, memories, inputs[0].device),
    )
    planned = _with_batch_norm(plan(traced.graph, request), traced, requested.batch_norm)
    run.check_same(planned)
    if (name := other_random(traced)) and run.rank == 0:
        log.warning("Operator %s draws other random numbers than in a single process.", name)
    return traced, planned


def _with_batch_norm(planned: Plan, traced: Traced, requested: str | None) -> Plan:
    """The plan with how BatchNorm is treated, where there is any. Raises InvalidCall."""
    opaque = opaque_batch_norms(traced)
    if not opaque and not batch_norms(traced):
        return dataclasses.replace(planned, batch_norm="")
    if requested == "deferred" and not all(defer_statistics(layer) for layer in opaque):
        raise InvalidCall(
            "BatchNorm layers that are not traced into, or do more, cannot defer their statistics.",
            "Use batch_norm='micro' or 'exact'.",
        )
    if requested is None and planned.schedule.micro_batches > 1:
        log.warning(
            "BatchNorm: each of the %d micro-batches has its own statistics, so results differ from those of "
            "a single process. Give batch_norm='micro' to accept that, 'deferred' or 'exact' to change it.",
            planned.schedule.micro_batches,
        )
    chosen = requested or ("micro" if planned.schedule.micro_batches > 1 else "exact")
    return dataclasses.replace(planned, batch_norm=chosen)


class Pipeline:
    """A model in stages on several ranks. Made by `pipeline`.

        loss = model.step(inputs, targets, loss=torch.nn.functional.cross_entropy)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    Or call it as any model; then it holds the activations of all micro-batches until the backward pass:

        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
    """

    def __init__(
        self, traced: Traced, planned: Plan, optimizer: torch.optim.Optimizer, run: Run, streamed: bool
    ) -> None:
        self._traced, self._plan, self._run = traced, planned, run
        self._took: list[float] = []
        self._modes = {module: module.training for module in traced.model.modules()}
        self._tensors = _persistent(traced.model)
        self._described = {name: (t.shape, t.dtype) for name, t in self._tensors.items()}
        send_buffers(traced.model, run)
        stages = planned.schedule.ranks
        first = run.rank - run.rank % stages
        self._stage, self._ranks = run.rank - first, list(range(first, first + stages))
        # All ranks form all groups that they are in, in the same order.
        self._pipeline = run.group(self._ranks)
        self._replicas = run.group(range(self._stage, run.size, stages))
        self._owners = self._holders()
        self._arrivals = Arrivals(traced.model) if streamed else None
        self._carriers = send_parameters(traced, self._owners, stages, run, self._arrivals)
        self._optimizer = optimizer
        self._groups = named_groups(optimizer, {id(p): name for name, p in traced.model.named_parameters()})
        self._keep_own(optimizer)
        self._states = self._states_of_stages()
        self._sharing = self._groups_of_shared()
        save_memory(planned, self._stage, traced.model)
        self._passes = Passes(traced, planned, run, self._ranks, self._pipeline, self._arrivals)
        watch_clipping(self)

    def _settle(self) -> None:
        """Wait for all parameters that travel, here or from here."""
        if self._arrivals:
            try:
                self._arrivals.wait_all()
                self._carriers.clear()
            finally:
                self._arrivals.remove()

    @property
    def replica(self) -> int:
        """The number of this rank's pipeline: which share of the data it reads."""
        return self._run.rank // self._plan.schedule.ranks

    @property
    def replicas(self) -> int:
        """How many pipelines there are."""
        return self._plan.replicas

    @property
    def training(self) -> bool:
        """Whether the model trains, or is evaluated."""
        return self._traced.model.training

    def train(self, mode: bool = True) -> "Pipeline":
        """Train from now on. Layers have the modes that they had when `pipeline` was called."""
        self._traced.model.train(mode)
        for module, trains in self._modes.items() if mode else ():
            module.training = trains
        return self

    def eval(self) -> "Pipeline":
        """Evaluate from now on: without Dropout, and with the running statistics of BatchNorm."""
        return self.train(False)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The model's outputs for a batch, on all ranks of the pipeline, which call this together.

        Where gradients are enabled, `backward()` of a loss of them adds to the gradients of the parameters;
        all ranks call it, and the loss is a mean over the samples. In training all replicas take part.

        Args:
            inputs: What the model is called with; the same on all ranks of a replica. In training at most
                as many samples as in the example.

        Returns:
            A tensor, or a tuple of them where the model returns several.

        Raises:
            InvalidCall: A batch that does not fit the example, or a model that cannot be called so.
            PeerLost: Another rank ended.
        """
        return self.outputs(inputs)

    def outputs(self, inputs: Sequence[torch.Tensor], counted: int | None = None) -> Any:
        """As a call makes them.

        Args:
            inputs: What the model is called with.
            counted: See `step`.
        """
        batch = example_tensors(inputs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in batch):
            raise InvalidCall(
                "An input of the pipeline wants a gradient, and none is made for inputs.",
                "Use inputs.detach().",
            )
        if not self.training:
            self._settle()
        called = self._passes.call(batch, None if self.training else self._described, counted)
        self._settle()
        if not torch.is_grad_enabled():
            outputs = tuple(called.outputs)
            if self.training:
                self._average_statistics()
        else:
            outputs = connected(called, self._backward)
        return outputs[0] if len(outputs) == 1 else outputs

    def _backward(self, called: Called, gradients: Sequence[torch.Tensor | None]) -> None:
        with self._adding():
            self._passes.call_backward(called, gradients)

    @contextlib.contextmanager
    def _adding(self) -> Iterator[None]:
        """Gradients of what runs here are summed over ranks, and added to those that there were."""
        own = [p for p in self.parameters() if p.requires_grad]
        before = [p.grad for p in own]
        for parameter in own:
            parameter.grad = None
        try:
            yield
            self._reduce(own)
            self._average_statistics()
        finally:
            for parameter, earlier in zip(own, before, strict=True):
                if earlier is not None:
                    parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def plan(self) -> Plan:
        """How the model is cut, what that is expected to take, and what steps took; print it."""
        if not self._took:
            return self._plan
        return self._plan.after(sorted(self._took)[len(self._took) // 2])

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank's stage."""
        return iter([p for _, p in self.named_parameters()])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same, with their names in the whole model."""
        for name, parameter in self._traced.model.named_parameters():
            if self._stage in self._owners[name]:
                yield name, parameter

    def step(
        self,
        inputs: torch.Tensor | Sequence[torch.Tensor],
        targets: Any = None,
        *,
        loss: Callable[[Any, Any], torch.Tensor],
        counted: int | None = None,
    ) -> torch.Tensor:
        """Forward and backward passes of a batch: gradients are added to those of the parameters.

        Args:
            inputs: What the model is called with; the same on all ranks of a replica, other samples on each
                replica. At most as many samples as in the example.
            targets: Tensors with as many samples, or lists or dictionaries of such.
            loss: From what the model returns and the targets to the mean over their samples.
            counted: 0 where this replica has no samples left and only takes part, with any one sample.

        Returns:
            The mean loss over the samples of all replicas, on all ranks.

        Raises:
            InvalidCall: A batch that does not fit the example.
            PeerLost: Another rank ended.
        """
        if not self.training:
            raise InvalidCall("The model is in evaluation.", "Call model.train() before model.step().")
        began = time.perf_counter()
        batch = example_tensors(inputs)
        with self._adding():
            value = self._passes.run(batch, targets, loss, counted)
            self._settle()
        total = torch.tensor([value], dtype=torch.float64)
        if self._run.world_group:
            self._run.world_group.allreduce(total, timeout=self._run.timeout)
        self._took = [*self._took[1 - _STEP_COUNT :], (time.perf_counter() - began) * 1000]
        return total[0].to(torch.float32)

    @property
    def ends_here(self) -> bool:
        """Whether this rank's stage is the one that computes the loss."""
        return self._plan.schedule.holders[-1] == self._stage

    def owners(self, name: str) -> list[int]:
        """The stages that hold a parameter, by its name in the whole model; ranks of the first replica."""
        return self._owners[name]

    @property
    def stage(self) -> int:
        """The number of this rank's stage."""
        return self._stage

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients of the model so that their norm is at most this; the norm before."""
        norm = self.gradient_norm([p.grad for p in self.parameters() if p.grad is not None])
        scale = min(1.0, max_norm / (float(norm) + 1e-6))
        for parameter in self.parameters():
            if parameter.grad is not None and scale < 1:
                parameter.grad.mul_(scale)
        return norm.to(torch.float32)

    def owns_gradients(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether these are gradients of this rank's stage; a stage may have none at all."""
        own = {id(p.grad) for p in self.parameters() if p.grad is not None}
        return any(id(g) in own for g in gradients) if gradients else not own

    def gradient_norm(self, gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
        """The norm of these gradients of this stage, and of those that all other stages give meanwhile."""
        identities = {id(gradient) for gradient in gradients}
        counted = [
            p.grad
            for name, p in self.named_parameters()
            if p.grad is not None and id(p.grad) in identities and self._owners[name][0] == self._stage
        ]
        return norm_of_stages(counted, norm_type, self._pipeline, self._run.timeout)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state, as the model itself has it: in rank 0's host memory; else nothing.

        All ranks call it together.
        """
        self._settle()
        whole: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in self._described.items():
            owner = self._owners[name][0]
            held = self._stage == owner and self._run.rank < self._plan.schedule.ranks
            content = on_host(self._tensors[name]) if held else torch.empty(shape, dtype=dtype)
            if self._run.world_group and content.numel():
                self._run.world_group.broadcast(bytes_of(content), owner, timeout=self._run.timeout)
            if self._run.rank == 0:
                whole[name] = content
        names = self._states.names
        return {name: whole[first] for name, first in names.items()} if self._run.rank == 0 else {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take a state of the whole model, of any layout: rank 0's, whatever the others give.

        All ranks call it together.

        Raises:
            InvalidCall: Its names or shapes are not the model's. No rank has changed anything then.
        """
        self._settle()
        names = self._states.names
        problem = mismatch(state, names, self._described) if self._run.rank == 0 else ""
        problem = self._run.broadcast(problem.encode()).decode()
        if problem:
            raise InvalidCall(problem, "Load the state into the model that it was made of.")
        firsts = {first: name for name, first in reversed(names.items())}
        for first, name in firsts.items():
            shape, dtype = self._described[first]
            content = torch.empty(shape, dtype=dtype)
            if self._run.rank == 0:
                content.copy_(state[name])
            if self._run.world_group and content.numel():
                self._run.world_group.broadcast(bytes_of(content), 0, timeout=self._run.timeout)
            if self._stage in self._owners[first]:
                with torch.no_grad():
                    self._tensors[first].copy_(content)

    def take_state(self) -> dict[str, Any]:
        """The whole model's state for `Checkpoints`, each rank with its stage's tensors."""
        self._settle()
        return self._states.take_model()

    def own_state(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Of a checkpoint's part for the whole model: what this rank needs of it."""
        return self._states.own_of_model(part)

    def give_state(self, own: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `own_state` has chosen. All ranks call it together; raises InvalidCall."""
        self._settle()
        self._states.give_model(own)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's state as one process has it, of all stages: on rank 0; nothing on the others.

        All ranks call it together. To continue in any layout, load it into the optimizer before `pipeline`.
        """
        return whole_optimizer_state(
            self._optimizer,
            self._groups,
            self._owners,
            dict(self.named_parameters()),
            self._run,
            self._stage if self.replica == 0 else -1,
        )

    def close(self) -> None:
        """Give up the memory of messages now. All ranks call it together.

        Without it that memory goes after all ranks have let go of this object, with the next pipeline.
        """
        forget_clipping(self)
        try:
            self._settle()
        finally:
            self._passes.close()

    def _holders(self) -> dict[str, list[int]]:
        """By name of a parameter or buffer: the stages that hold it. The first holds what is not used."""
        holders: dict[str, list[int]] = {}
        for piece in range(self._plan.pieces.count):
            for name in self._plan.pieces.parameters(piece):
                holders.setdefault(name, []).append(self._plan.schedule.holders[piece])
        known = [name for name, _ in self._traced.model.named_parameters()]
        known += [name for name, _ in self._traced.model.named_buffers()]
        return {name: sorted(set(holders.get(name, [0]))) for name in known}

    def _keep_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Let go of other stages' parameters."""
        own = {id(parameter) for parameter in self.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
        for parameter in [p for p in optimizer.state if id(p) not in own]:
            del optimizer.state[parameter]
        for parameter in self._traced.model.parameters():
            if id(parameter) not in own:
                parameter.grad = None
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def _states_of_stages(self) -> StageStates:
        """What checkpoints take. They find the optimizer's state by the optimizer alone."""
        states = StageStates(
            self._run, self._stage, self._owners, self._described, self._tensors,
            self._traced.model, self._optimizer, self._groups,
        )  # fmt: skip
        note_stages(states)
        return states

    def _groups_of_shared(self) -> list[tuple[Group, list[nn.Parameter]]]:
        """Whose gradients are made on several stages: their groups, and these parameters."""
        sharing: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name, parameter in self._traced.model.named_parameters():
            holders = tuple(self._owners[name])
            if len(holders) > 1 and parameter.requires_grad:
                sharing.setdefault(holders, []).append(parameter)
        groups = []
        for holders in sorted(sharing):
            group = self._run.group([self._ranks[stage] for stage in holders])
            if group:
                groups.append((group, sharing[holders]))
        return groups

    def _average_statistics(self) -> None:
        """Running statistics of BatchNorm are the means of those of the replicas."""
        if not self._replicas or not self._plan.batch_norm:
            return
        buffers = [
            self._tensors[name]
            for name in self._described
            if name.endswith(_RUNNING) and self._stage in self._owners[name]
        ]
        if buffers:
            flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers])
            allreduce(self._replicas, flat, self._run.timeout)
            parts = (flat / self.replicas).split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

    def _reduce(self, own: list[nn.Parameter]) -> None:
        """Sum gradients over replicas, and those of shared parameters over stages."""
        if self._replicas or any(len(stages) > 1 for stages in self._owners.values()):
            shared = [p for _, parameters in self._sharing for p in parameters]
            refuse_sparse(self._run, own if self._replicas else shared)
        if self._replicas:
            sum_gradients(self._replicas, own, self._run.timeout)
        for group, parameters in self._sharing:
            sum_gradients(group, parameters, self._run.timeout)


def _persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their first names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
