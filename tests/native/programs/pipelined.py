"""Trains as a pipeline, and sees that a single process does the same.

    pipelined.py MODEL STAGES SCHEDULES...

Each of SCHEDULES is NAME:MICRO_BATCHES, with further words behind colons: see `train`; or a name of ONCE.
"""

import copy
import dataclasses
import functools
import random
import re
import sys
import time
from typing import Any

import pipeline_models
import torch
import torch.distributed as dist
from torch.nn import functional

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.collectives.mailboxes import Mailboxes
from carme_runtime.pipeline import Pieces, Plan, PlanError
from carme_runtime.pipeline.messages import Post
from carme_runtime.pipeline.pieces import cut_places
from carme_runtime.torch import pipeline, trace
from carme_runtime.torch.measuring import measured
from carme_runtime.torch.pieces import piece_of
from carme_runtime.torch.traced import Traced
from carme_runtime.torch.tracing import capture
from carme_runtime.torch.views import replaceable

torch.set_num_threads(1)
LIMIT = 1e-5


def delayed(seed: int) -> None:
    """Let every use of a mailbox wait for a random time before it."""
    choice = random.Random(seed)
    for name in ("slot", "put", "take", "give_up"):
        original = getattr(Mailboxes, name)

        def late(*arguments: Any, original: Any = original) -> Any:
            time.sleep(choice.choice((0, 0, 0.001, 0.004)) * choice.random())
            return original(*arguments)

        setattr(Mailboxes, name, late)


def counted_bytes() -> list[int]:
    """A list, whose only number is how many bytes of values and gradients this rank has sent from now on."""
    found, original = [0], Post.send

    def send(post: Post, channel: Any, back: bool, micro: int, parts: list[Any]) -> None:
        if channel in post._remote:
            found[0] += sum(p.nbytes if isinstance(p, torch.Tensor) else 8 for p in parts if p is not None)
        original(post, channel, back, micro, parts)

    Post.send = send
    return found


def alike(tested: torch.Tensor, expected_value: torch.Tensor, what: str, limit: float = LIMIT) -> None:
    assert tested.dtype == expected_value.dtype, what
    difference = float(
        (tested - expected_value).double().norm() / expected_value.double().norm().clamp(min=1e-12)
    )
    # Gradients that are zero but for rounding have no relative size.
    assert difference < limit or float((tested - expected_value).abs().max()) < 1e-7, (what, difference)


def single_step(model: Any, inputs: Any, targets: Any, micro_batches: int, together: bool) -> torch.Tensor:
    """A step of one process, on the whole batch or on micro-batches."""
    total = torch.zeros(())
    for parts in zip(*(t.chunk(1 if together else micro_batches) for t in (*inputs, targets)), strict=True):
        loss = functional.cross_entropy(model(*parts[:-1]), parts[-1])
        loss = loss * len(parts[-1]) / len(targets)
        loss.backward()
        total += loss.detach()
    return total


def tightest(model: Any, optimizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options for the least memory that works: the first stage then cannot hold its activations."""
    options = options | {"graph": trace(model, options["example"])}
    try:
        pipeline(model, optimizer, memory=1, **options)
    except PlanError as error:
        found = re.search(r"Give memory=(\d+) bytes", error.remedy)
        assert found, error
        return options | {"memory": int(found[1])}
    raise AssertionError("a byte is enough")


def same_gradients(tested: Any, reference: Any, step: int) -> None:
    """Those of this stage are those of one process, and missing where that has none."""
    known = dict(reference.named_parameters())
    for each, parameter in tested.named_parameters():
        gradient, wanted = parameter.grad, known[each].grad
        assert (gradient is None) == (wanted is None), each
        if gradient is not None and wanted is not None:
            alike(gradient, wanted, f"gradient of {each} in step {step}")


def same_outputs(tested: Any, reference: Any, inputs: list[torch.Tensor]) -> None:
    """In evaluation."""
    with torch.no_grad():
        alike(tested.eval()(*inputs), reference.eval()(*inputs), "evaluation")


def train(name: str, stages: int, schedule: str, micro_batches: int, *words: str) -> Plan:
    model, inputs, targets = pipeline_models.make(name)
    options: dict[str, Any] = {"cut_points": getattr(model, "cut_points", ())}
    if "frozen" in words:
        for parameter in list(model.parameters())[:3]:
            parameter.requires_grad_(False)
    for word in words:
        if word in ("micro", "exact", "deferred"):
            options["batch_norm"] = word
    reference = copy.deepcopy(model)
    expected_value = torch.optim.SGD(reference.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    if dist.is_initialized() and dist.get_rank():
        for parameter in model.parameters():  # rank 0's count
            parameter.data.zero_()
    replicas = size() // stages
    share = len(targets) // replicas
    options |= {"example": [t[:share] for t in inputs], "stages": stages}
    options |= {"micro_batches": micro_batches, "schedule": schedule}
    if "tight" in words:
        options = tightest(model, optimizer, options)
    tested, optimizer = pipeline(model, optimizer, **options)
    replica, sent = rank() // stages, counted_bytes()
    together = not set(words) & {"micro", "deferred"}
    for step in range(40 if "often" in words else 3):
        count = share if step != 1 or "even" in words else 5  # a ragged batch
        own = slice(replica * count, (replica + 1) * count)
        whole = slice(0, replicas * count)
        torch.manual_seed(step)
        loss = tested.step([t[own] for t in inputs], targets[own], loss=functional.cross_entropy)
        torch.manual_seed(step)
        expected = single_step(reference, [t[whole] for t in inputs], targets[whole], micro_batches, together)
        alike(loss, expected, f"loss of step {step}")
        if not step and name != "untrained":  # some of its values get no gradients
            assert sent[0] == tested.plan().stages[rank() % stages].sent_bytes, (sent, str(tested.plan()))
        same_gradients(tested, reference, step)
        if "clip" in words:
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            alike(tested.clip_grad_norm_(0.1), norm, "norm")
        if step != 1 or "accumulate" not in words:
            for each in (optimizer, expected_value):
                each.step()
                each.zero_grad()
        if "freeze" in words:
            for parameter in [*list(model.parameters())[2:4], *list(reference.parameters())[2:4]]:
                parameter.requires_grad_(False)
    state = tested.state_dict()
    if rank() == 0:
        known = reference.state_dict()
        assert list(state) == list(known)
        for each, tensor in state.items():
            if "running" in each and "deferred" in words:
                continue  # seen by `statistics`
            alike(tensor.double(), known[each].double(), each)
        print(tested.plan())
    if "evaluate" in words:
        same_outputs(tested, reference, [t[:share] for t in inputs])
    tested.close()
    return tested.plan()


def views(stages: int) -> None:
    """Views of what crosses a cut are made behind it."""
    copied_views()
    for schedule, micro_batches, *words in (("1f1b", 4, "evaluate", "clip"), ("zb1p", 6, "accumulate")):
        planned = train("views", stages, schedule, micro_batches, *words)
        assert planned.pieces.channels == {(0, 1): ("tanh", "linear_1")}, planned.pieces.channels
        train("turned", stages, schedule, micro_batches, *words)
    for name in ("transformer", "lstm", "views", "turned", "resnet"):
        model, inputs, _ = pipeline_models.make(name)
        traced = capture(model, inputs)
        graph = measured(traced, inputs, seconds=0.1)
        for place in cut_places(graph):
            run_in_two(dataclasses.replace(traced, graph=graph), place, inputs)
            sizes: dict[str, int] = {}  # by value: bytes that are sent of it and what lies in its memory
            for each in Pieces(graph, (place,)).channels.get((0, 1), ()):
                whole = graph.operators[graph.maker[each]].within or each
                sizes[whole] = sizes.get(whole, 0) + graph.value[each].bytes
            for whole, size in sizes.items():
                most = 0 if whole in graph.inputs else graph.value[whole].bytes
                assert size <= most, (name, place, sizes)


class Changed(torch.nn.Module):
    """Its first view shares memory with what changes afterwards; before the second one all has changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = torch.tanh(x)
        early = base.view(-1, 4)
        base.mul_(2)
        return early + base.view(-1, 4)


def copied_views() -> None:
    """A view may be copied unless its memory changes afterwards."""
    traced = capture(Changed(), (torch.randn(6, 2, 2),))
    early, late = [node.name for node in traced.nodes if "view" in str(node.target)]
    assert replaceable(traced) == {late}, (early, late, replaceable(traced))


def run_in_two(traced: Traced, place: int, inputs: tuple[torch.Tensor, ...]) -> None:
    """Two pieces give what the model gives; the second gets values as messages bring them, in order."""
    pieces = Pieces(traced.graph, (place,))
    known: dict[str, Any] = {"input": dict(zip(traced.graph.inputs, inputs, strict=True)), "value": {}}
    known["parameter"] = traced.named_tensors()
    with torch.no_grad():
        for number in range(2):
            piece = piece_of(traced, pieces, number, deferred=False, split=False)
            results = piece.function(*(known[kind][name] for kind, name in piece.arguments))
            own = dict(zip(piece.results, results, strict=True))
            sent = {n: v.contiguous() if isinstance(v, torch.Tensor) else v for n, v in own.items()}
            known["value"].update(own if number else sent)
        alike(known["value"][traced.graph.results[0]], traced.model(*inputs), f"cut before operator {place}")


def deferred_statistics(stages: int, again: bool = False) -> None:
    """Running statistics of a layer are those that the whole batch gives."""
    layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)]
    model = torch.nn.Sequential(*layers)
    whole = copy.deepcopy(model)
    torch.manual_seed(2)
    inputs, targets = torch.randn(240, 4) * 3 + 1, torch.randint(0, 3, (240,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"example": inputs, "stages": stages, "micro_batches": 8, "schedule": "gpipe"}
    options |= {"batch_norm": "deferred", "cut_points": ["2"]}
    if again:
        options = tightest(model, optimizer, options)
    tested, _ = pipeline(model, optimizer, **options)
    assert tested.plan().recomputes(0) == again
    tested.step(inputs, targets, loss=functional.cross_entropy)
    whole(inputs)
    state = tested.state_dict()
    for name, tensor in whole.state_dict().items():
        if rank() == 0 and name.startswith("1.") and tensor.dim() < 2 and "weight" not in name:
            alike(state[name].double(), tensor.double(), name)
    tested.close()


def replica_statistics(stages: int) -> None:
    """Running statistics are the means of those that each replica sees, and replicas evaluate alike."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    alone = [copy.deepcopy(model) for _ in range(size() // stages)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tested, _ = pipeline(model, optimizer, example=torch.zeros(6, 4), stages=stages, batch_norm="exact")
    for step in range(2):
        torch.manual_seed(step)
        inputs, targets = torch.randn(6 * len(alone), 4) * 3 + 1, torch.randint(0, 3, (6 * len(alone),))
        part = slice(tested.replica * 6, tested.replica * 6 + 6)
        tested.step(inputs[part], targets[part], loss=functional.cross_entropy)
        for number, replica in enumerate(alone):
            replica(inputs[number * 6 : number * 6 + 6])
    state = tested.state_dict()
    for name in ("0.running_mean", "0.running_var") if rank() == 0 else ():
        alike(state[name], torch.stack([replica.state_dict()[name] for replica in alone]).mean(0), name)
    with torch.no_grad():
        outputs = tested.eval()(torch.ones(20, 4))
    everyone = [torch.empty_like(outputs) for _ in range(size())]
    dist.all_gather(everyone, outputs)
    for each in everyone:
        alike(each, everyone[0], "evaluation of replicas")
    tested.close()


def several_outputs(stages: int) -> None:
    """Of two stages; the loss takes both, with several targets."""
    torch.manual_seed(5)
    model, inputs = pipeline_models.TwoOutputs(), torch.randn(12, 8)
    targets = {"early": torch.randn(12, 2), "late": torch.randint(0, 3, (12,))}
    reference = copy.deepcopy(model)

    def loss(outputs: Any, wanted: Any) -> torch.Tensor:
        early, late = outputs
        return functional.mse_loss(early, wanted["early"]) + functional.cross_entropy(late, wanted["late"])

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tested, _ = pipeline(model, optimizer, example=inputs, stages=stages, micro_batches=4)
    alike(
        tested.step(inputs, targets, loss=loss),
        (expected := loss(reference(inputs), targets)).detach(),
        "loss",
    )
    expected.backward()
    known = dict(reference.named_parameters())
    for name, parameter in tested.named_parameters():
        alike(parameter.grad, known[name].grad, name)  # pyright: ignore[reportArgumentType]
    tested.close()


def several_lengths(stages: int) -> None:
    """Sentences of other lengths than the example, in training and evaluation."""
    for name in ("words", "lstm"):
        model, (words,), targets = pipeline_models.make(name)
        reference, replicas = copy.deepcopy(model), size() // stages
        count = len(targets) // replicas
        part = slice(rank() // stages * count, (rank() // stages + 1) * count)
        expected_value = torch.optim.SGD(reference.parameters(), 0.1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options: dict[str, Any] = {"stages": stages, "micro_batches": 4, "variable_shapes": True}
        tested, optimizer = pipeline(model, optimizer, example=words[part], **options)
        for step, length in enumerate((6, 4, 5)):
            torch.manual_seed(step)
            loss = tested.step(words[part, :length], targets[part], loss=functional.cross_entropy)
            torch.manual_seed(step)
            expected = single_step(reference, (words[:, :length],), targets, 1, True)
            alike(loss, expected, f"loss of {name} with {length} words")
            known = dict(reference.named_parameters())
            for each, parameter in tested.named_parameters():
                alike(parameter.grad, known[each].grad, f"{each} with {length} words")  # pyright: ignore
            for stepped in (optimizer, expected_value):
                stepped.step()
                stepped.zero_grad()
        for length in (3, 7):
            with torch.no_grad():
                if length == 7:
                    refuse_long_sentences(tested, length)
                    continue
                outputs = tested.eval()(words[:, :length])
                alike(outputs, reference.eval()(words[:, :length]), f"evaluation of {length} words")
        tested.close()


def refuse_long_sentences(tested: Any, length: int) -> None:
    try:
        tested(torch.zeros(4, length, dtype=torch.int64))
    except InvalidCall as error:
        assert f"has samples of shape [{length}]" in str(error), error
        return
    raise AssertionError("a sentence for which there is no room was taken")


def in_bfloat16(stages: int, again: bool = False) -> None:
    """With weights in bfloat16, and with autocast; rounding is that of bfloat16."""
    for schedule, whole in (("gpipe" if again else "zb1p", False), ("1f1b", True)):
        model, inputs, targets = pipeline_models.make("resnet" if whole else "mlp")
        if whole:
            model, inputs = model.bfloat16(), tuple(t.bfloat16() for t in inputs)
        reference = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options: dict[str, Any] = {"micro_batches": 4, "schedule": schedule, "stages": stages}
        options["example"] = inputs
        if again:
            options = tightest(model, optimizer, options)
        tested, _ = pipeline(model, optimizer, **options)
        assert any(fit.recomputes for fit in tested.plan().fits) == again
        with torch.autocast("cpu", torch.bfloat16, enabled=not whole):
            loss = tested.step(inputs, targets, loss=functional.cross_entropy)
            expected = functional.cross_entropy(reference(*inputs), targets)
        expected.backward()
        alike(loss, expected.detach().float(), "loss in bfloat16", 0.02)
        known = dict(reference.named_parameters())
        for name, parameter in tested.named_parameters():
            alike(parameter.grad, known[name].grad, f"{name} in bfloat16", 0.1)  # pyright: ignore
        tested.clip_grad_norm_(1.0)
        optimizer.step()
        tested.close()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


ONCE = {
    "statistics": deferred_statistics,
    "statistics-again": functools.partial(deferred_statistics, again=True),
    "views": views,
    "replicas": replica_statistics,
    "bfloat16": in_bfloat16,
    "bfloat16-again": functools.partial(in_bfloat16, again=True),
    "outputs": several_outputs,
    "lengths": several_lengths,
}

if __name__ == "__main__":
    dist.init_process_group("carme")
    name, stages, schedules = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    for number, specification in enumerate(schedules):
        if specification in ONCE:
            ONCE[specification](stages)
            continue
        schedule, micro_batches, *words = specification.split(":")
        if "delays" in words and number == 0:
            delayed(rank())
        train(name, stages, schedule, int(micro_batches), *words)
    dist.destroy_process_group()
