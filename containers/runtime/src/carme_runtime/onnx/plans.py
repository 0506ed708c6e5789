"""Plans: which fused tasks a model becomes, who runs them, what travels, and how long it should take."""

import heapq
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from carme_runtime.graph import Graph, Links, drawing
from carme_runtime.graph.show import columns, size_text
from carme_runtime.onnx.errors import OnnxError
from carme_runtime.onnx.fusion import TASK_MS, allowed, balanced_cuts, branch_cuts, components, fed
from carme_runtime.onnx.loading import Model
from carme_runtime.onnx.splitting import Split, Splitter
from carme_runtime.petri.starting import is_job, per_node

KINDS = ("cpu", "gpu")
#: How much faster than one processor a GPU is taken to be, where it was not measured.
GPU_SPEED = 10.0
#: A plan has to be so much quicker to be taken instead of one that sends fewer bytes.
_BETTER = 0.97
#: Splits are tried while there are fewer micro-batches than so many for each worker, of operators that take
#: at least so many times what a task costs, and of so many groups of them.
_FEW, _LONG, _MOST_GROUPS = 2, 20, 24
#: How much quicker one more split has to be; all together have to be as much as another plan.
_STEP = 0.99
_MOST_FLIPS = 200


@dataclass(frozen=True)
class Task:
    """Fused operators: what one worker runs at once.

    Args:
        name: In the plan, and of the net's transition.
        operators: Names of nodes, in order.
        kind: Of the workers that run it: cpu or gpu.
        milliseconds: On one processor.
        inputs: Names of values that it is given, by other tasks or the program.
        outputs: Names of values that others or the program want.
        parameter_bytes: Of its weights.
    """

    name: str
    operators: tuple[str, ...]
    kind: str
    milliseconds: float
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameter_bytes: int


@dataclass(frozen=True)
class Plan:
    """A compiled model.

    Args:
        graph: With its costs.
        cuts: Places of operators with which parts begin, but the first.
        tasks: In an order in which they can run.
        workers: How many of each kind.
        micro_batches: For which it was made.
        splits: Operators that are taken apart; the graph has their parts.
        unsplit: The graph with no operator taken apart; None: it is the same.
    """

    graph: Graph
    cuts: tuple[int, ...]
    tasks: tuple[Task, ...]
    workers: Mapping[str, int] = field(default_factory=lambda: {"cpu": 1})
    micro_batches: int = 1
    splits: tuple[Split, ...] = ()
    unsplit: Graph | None = None

    @cached_property
    def maker(self) -> dict[str, int]:
        """Which task makes a value."""
        return {name: place for place, task in enumerate(self.tasks) for name in task.outputs}

    @cached_property
    def edges(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """The values that each task gets from each other one; -1: from the program."""
        found: dict[tuple[int, int], list[str]] = {}
        for place, task in enumerate(self.tasks):
            for name in task.inputs:
                found.setdefault((self.maker.get(name, -1), place), []).append(name)
        return {edge: tuple(names) for edge, names in sorted(found.items())}

    @property
    def sent_bytes(self) -> int:
        """That travel between tasks for one micro-batch."""
        return self._bytes(name for edge, names in self.edges.items() if edge[0] >= 0 for name in names)

    @property
    def value_bytes(self) -> list[int]:
        """Of each value that tasks get or give, for one micro-batch."""
        names = {name for task in self.tasks for name in (*task.inputs, *task.outputs)}
        return [self.graph.value[name].bytes for name in names]

    @property
    def unfused_bytes(self) -> int:
        """That would travel if each operator were a task."""
        graph = self.unsplit or self.graph
        return sum(
            graph.value[name].bytes
            for operator in graph.operators
            for name in dict.fromkeys(operator.inputs)
            if graph.maker[name] >= 0
        )

    @property
    def one_worker_ms(self) -> float:
        """One worker, the whole model as one task, all micro-batches."""
        graph = self.unsplit or self.graph
        total = sum(each.forward_ms(graph.samples) for each in graph.operators)
        return self.micro_batches * (total + TASK_MS)

    @cached_property
    def predicted_ms(self) -> float:
        """All micro-batches on these workers: tasks start as soon as they can, later ones first."""
        return _simulated(self)

    def drawing(self) -> str:
        """The graph with its cuts as a picture (SVG)."""
        return drawing(self.graph, self.cuts)

    def to_json(self) -> str:
        """For programs: sizes in bytes, times in milliseconds."""
        tasks = [
            {
                "name": task.name,
                "workers": task.kind,
                "milliseconds": round(task.milliseconds, 4),
                "operators": list(task.operators),
                "inputs": list(task.inputs),
                "outputs": list(task.outputs),
                "parameter_bytes": task.parameter_bytes,
                "sent_bytes": self._sent(place),
            }
            for place, task in enumerate(self.tasks)
        ]
        return json.dumps(
            {
                "source": self.graph.source,
                "workers": dict(self.workers),
                "micro_batches": self.micro_batches,
                "predicted_ms": round(self.predicted_ms, 4),
                "one_worker_ms": round(self.one_worker_ms, 4),
                "sent_bytes": self.sent_bytes,
                "unfused_bytes": self.unfused_bytes,
                "splits": [
                    {"operators": list(each.operators), "by": each.by, "parts": each.parts}
                    for each in self.splits
                ],
                "tasks": tasks,
            },
            indent=1,
        )

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("task", "from", "operators", "workers", "ms", "weights", "sent")]
        for place, task in enumerate(self.tasks):
            sizes = map(size_text, (task.parameter_bytes, self._sent(place)))
            count = str(len(task.operators))
            rows.append((task.name, task.operators[0], count, task.kind, f"{task.milliseconds:.2f}", *sizes))
        workers = ", ".join(f"{kind}:{count}" for kind, count in self.workers.items())
        n, m = len(self.tasks), self.micro_batches
        operators = (self.unsplit or self.graph).operators
        lines = [
            f"{len(operators)} operators in {n} task{'s' * (n != 1)}, {m} "
            f"micro-batch{'es' * (m != 1)}, workers {workers}.",
            columns(rows, left=2),
            *(f"Split: {each}." for each in self.splits),
            f"Between tasks travel {size_text(self.sent_bytes)} a micro-batch; unfused, it would be "
            f"{size_text(self.unfused_bytes)}.",
            f"Predicted: {self.predicted_ms:.1f} ms; one worker: {self.one_worker_ms:.1f} ms.",
        ]
        if self.workers.get("gpu"):
            lines.append(f"A GPU is taken to be {GPU_SPEED:.0f} times as fast as one processor.")
        return "\n".join(lines) + "\n"

    def _sent(self, place: int) -> int:
        return self._bytes(
            name for (maker, _), names in self.edges.items() if maker == place for name in names
        )

    def _bytes(self, names: Any) -> int:
        return sum(self.graph.value[name].bytes for name in names)


def parse_workers(text: str | int | Mapping[str, int]) -> dict[str, int]:
    """Workers such as `cpu:2,gpu:1`, their number, or those of a job (`job`, `job:4`). Raises OnnxError."""
    if is_job(text):
        return {"cpu": _nodes() * (per_node(text) or len(os.sched_getaffinity(0)))}
    if isinstance(text, Mapping):
        text = ",".join(f"{kind}:{count}" for kind, count in text.items())
    if isinstance(text, int) or str(text).isdecimal():
        text = f"cpu:{text}"
    found: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        kind, _, count = part.partition(":")
        if kind not in KINDS or not (count or "1").isdecimal() or not 1 <= int(count or 1) <= 1024:
            raise OnnxError(f"'{part}' is not a group of workers.", "Write a kind and a number: cpu:2,gpu:1")
        found[kind] = found.get(kind, 0) + int(count or 1)
    if not found:
        raise OnnxError("There are no workers.", "Write a kind and a number: cpu:2,gpu:1")
    return found


def _nodes() -> int:
    """Of the job, as Slurm says: which of them have joined the run shows when it starts."""
    count = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    return max(int(count), 1) if count.isdecimal() else 1


def plan(
    graph: Graph,
    workers: str | int | Mapping[str, int] = 1,
    *,
    tasks: int | None = None,
    micro_batches: int = 1,
    model: Model | None = None,
) -> Plan:
    """Compile a graph: fuse its operators into tasks, and assign these to workers.

    Operators that take long are split over several workers where that is predicted to be quicker.

    Args:
        graph: Of `trace`.
        workers: Such as "cpu:2,gpu:1", a number of processes, "job" for those of all its nodes, or
            "job:4" for so many on each.
        tasks: Into how many parts the model is cut; None: what is predicted to be quickest, and of plans
            that take about the same time the one that sends the fewest bytes.
        micro_batches: How many follow each other.
        model: The graph's model; None: no operator is split.

    Raises:
        OnnxError: The workers make no sense, or the model cannot be cut into so many parts.
    """
    found = parse_workers(workers)
    if is_job(workers) and _nodes() > 1:
        graph = replace(graph, links=Links())
    if tasks is not None:
        cuts = _wanted_cuts(graph, tasks)
        return _assigned(_plan_of(graph, cuts, found, micro_batches, split=False))
    count = sum(found.values())
    candidates: list[tuple[int, ...] | None] = [()]
    if count > 1:
        candidates += [balanced_cuts(graph, parts) for parts in {count, 2 * count}]
        candidates += [branch_cuts(graph)] if micro_batches < count else []
    plans = [
        _assigned(_plan_of(graph, cuts, found, micro_batches, split=True))
        for cuts in dict.fromkeys(candidates)
        if cuts is not None
    ]
    best = plans[0]
    for candidate in sorted(plans[1:], key=lambda each: each.sent_bytes):
        if candidate.predicted_ms < _BETTER * best.predicted_ms:
            best = candidate
    if model is not None and count > 1 and micro_batches < _FEW * count:
        best = _with_splits(best, Splitter(model, graph), count)
    return best


def _with_splits(whole: Plan, splitter: Splitter, parts: int) -> Plan:
    """The plan with those operators split that make it quicker, tried from those that take longest."""
    best = whole
    for group in splitter.candidates(parts)[:_MOST_GROUPS]:
        for tried in dict.fromkeys((tuple(group), *((each,) for each in group))):
            if any(splitter.milliseconds(split) < _LONG * TASK_MS for split in tried):
                continue
            names = {name for split in tried for name in split.operators}
            disjoint = tuple(each for each in best.splits if names.isdisjoint(each.operators))
            candidate = _split_plan(whole, splitter, (*disjoint, *tried))
            if candidate is not None and candidate.predicted_ms < _STEP * best.predicted_ms:
                best = candidate
    return best if best.predicted_ms < _BETTER * whole.predicted_ms else whole


def _split_plan(found: Plan, splitter: Splitter, splits: tuple[Split, ...]) -> Plan | None:
    """A plan in which these operators are split; None where a part of it could not begin."""
    graph, own = splitter.split_graph(splits)
    if not set(own) <= set(allowed(graph)):
        return None
    plans = []
    for cuts in dict.fromkeys((own, tuple(sorted({*own, *branch_cuts(graph)})))):
        candidate = _assigned(_plan_of(graph, cuts, dict(found.workers), found.micro_batches, split=True))
        plans.append(replace(candidate, splits=splits, unsplit=splitter.graph))
    return min(plans, key=lambda each: each.predicted_ms)


def _wanted_cuts(graph: Graph, tasks: int) -> tuple[int, ...]:
    if tasks < 1:
        raise OnnxError(f"A model cannot become {tasks} tasks.", "Ask for 1 or more.")
    for parts in range(tasks, 0, -1):
        cuts = balanced_cuts(graph, parts)
        if cuts is not None:
            if parts < tasks:
                count = sum(fed(graph))
                raise OnnxError(
                    f"The model cannot be cut into {tasks} tasks: it has {count} "
                    f"operator{'s' * (count != 1)} that depend{'s' * (count == 1)} on its inputs.",
                    f"Ask for {parts} at most.",
                )
            return cuts
    return ()


def _plan_of(graph: Graph, cuts: tuple[int, ...], workers: dict[str, int], m: int, *, split: bool) -> Plan:
    ends = [0, *cuts, len(graph.operators)]
    groups: list[list[int]] = []
    for begin, end in pairwise(ends):
        groups += components(graph, begin, end) if split and cuts else [list(range(begin, end))]
    tasks = tuple(_task(graph, group, f"part_{number}") for number, group in enumerate(groups))
    return Plan(graph, cuts, tasks, workers, m)


def _task(graph: Graph, group: list[int], name: str) -> Task:
    own, places = [graph.operators[place] for place in group], set(group)
    outputs = {value for each in own for value in each.outputs}
    used = dict.fromkeys(value for each in own for value in each.inputs if value not in outputs)
    wanted = [value for each in own for value in each.outputs if set(graph.users[value]) - places]
    parameters = [value for each in own for value in each.parameters]
    return Task(
        name,
        tuple(each.name for each in own),
        "cpu",
        sum(each.forward_ms(graph.samples) for each in own),
        tuple(used),
        tuple(wanted),
        graph.parameter_bytes(parameters),
    )


def _assigned(found: Plan) -> Plan:
    """Give tasks to the kinds of workers so that it takes the least time on paper."""
    kinds = list(found.workers)
    best = _on(found, [kinds[-1] if "gpu" not in found.workers else "gpu"] * len(found.tasks))
    if len(kinds) == 1:
        return best
    flips = 0
    better = True
    while better and flips < _MOST_FLIPS:
        better = False
        for place, task in enumerate(best.tasks):
            for kind in kinds:
                flips += 1
                chosen = [each.kind for each in best.tasks]
                chosen[place] = kind
                candidate = _on(found, chosen)
                if kind != task.kind and candidate.predicted_ms < 0.999 * best.predicted_ms:
                    best, better = candidate, True
    return best


def _on(found: Plan, kinds: list[str]) -> Plan:
    tasks = tuple(replace(task, kind=kind) for task, kind in zip(found.tasks, kinds, strict=True))
    return replace(found, tasks=tasks)


def _simulated(found: Plan) -> float:
    """The net on paper. Each worker takes what is ready, of the latest task first."""
    links, graph, count = found.graph.links, found.graph, len(found.tasks)
    receives = [
        sum(
            links.milliseconds(sum(graph.value[name].bytes for name in names))
            for (maker, place), names in found.edges.items()
            if place == task and maker >= 0
        )
        for task in range(count)
    ]
    after: dict[int, list[int]] = {}
    for maker, place in found.edges:
        if maker >= 0:
            after.setdefault(maker, []).append(place)
    before = [sum(1 for m, p in found.edges if p == task and m >= 0) for task in range(count)]
    free = dict(found.workers)
    ready = {kind: [] for kind in free}
    missing = {}
    for m in range(found.micro_batches):
        for task in range(count):
            missing[task, m] = before[task]
            if not before[task]:
                heapq.heappush(ready[found.tasks[task].kind], (-task, m))
    now, running = 0.0, []
    while True:
        for kind, waiting in ready.items():
            while waiting and free[kind]:
                task, m = heapq.heappop(waiting)
                speed = GPU_SPEED if kind == "gpu" else 1.0
                took = found.tasks[-task].milliseconds / speed + TASK_MS + receives[-task]
                free[kind] -= 1
                heapq.heappush(running, (now + took, -task, m, kind))
        if not running:
            return now
        now, task, m, kind = heapq.heappop(running)
        free[kind] += 1
        for following in after.get(task, ()):
            missing[following, m] -= 1
            if not missing[following, m]:
                heapq.heappush(ready[found.tasks[following].kind], (-following, m))
