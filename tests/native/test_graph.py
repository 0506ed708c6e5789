"""Models of PyTorch as graphs with measured costs."""

import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from carme_runtime.collectives.errors import InvalidCall, Timeout
from carme_runtime.graph import load, save
from carme_runtime.torch import measuring, trace
from carme_runtime.torch.pipeline_run import Run
from carme_runtime.torch.tracing import capture


class Branches(nn.Module):
    """A skip, tied weights, an in-place operation, two inputs, and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.dropout = nn.Dropout(0.5)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu_(self.norm(self.conv(image))).mean((2, 3))
        first, second = hidden.view(hidden.shape[0], -1).chunk(2, 1)
        return self.head(self.dropout(torch.cat([second, first], 1)) + self.embedding(label))


class Undecided(nn.Module):
    """What it computes depends on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x - 1


EXAMPLE = (torch.randn(8, 3, 16, 16), torch.arange(8))


def test_equal_layers_cost_the_same_however_busy_the_machine_is():
    equal = [nn.Linear(64, 64) for _ in range(5)]
    frozen = nn.Linear(64, 64).requires_grad_(False)
    model = nn.Sequential(*equal, frozen, nn.Linear(64, 64, bias=False))
    graph = trace(model, (torch.randn(8, 64, requires_grad=True),), seconds=0.2)
    first, *rest = [operator.timings for operator in graph.operators]
    assert rest[:4] == [first] * 4
    assert first not in rest[4:], "what does something else has times of its own"


def test_adding_gradients_to_earlier_ones_costs_as_much_as_there_are():
    """Those of parameters that are trained alone."""
    large, frozen = nn.Linear(1024, 1024), nn.Linear(1024, 64).requires_grad_(False)
    model = nn.Sequential(large, nn.ReLU(), frozen, nn.Linear(64, 64))
    linear, relu, fixed, small = trace(model, torch.randn(8, 1024), seconds=0.5).operators
    assert linear.accumulating_ms > small.accumulating_ms > 0
    assert relu.accumulating_ms == fixed.accumulating_ms == 0


def test_a_gradient_beyond_the_memory_for_earlier_ones_costs_as_much_as_its_parts(monkeypatch):
    """Each addition takes 1 ms here, and adds a KiB at most."""
    clock = itertools.count()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 1000))
    monkeypatch.setattr(measuring, "_MOST_ACCUMULATED", 1 << 10)
    gradients = measuring._Gradients([nn.Parameter(torch.ones(1024)), nn.Parameter(torch.ones(2, 64))])
    took = [gradients.adding_ms(torch.ones(shape)) for shape in ((2, 64), (1024,), (32, 32))]
    assert took == pytest.approx([1.0, 4.0, 4.0])


class Operations(TorchDispatchMode):
    """Notes operations, and the strides of the tensors that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append((str(function), [each.stride() for each in args if isinstance(each, torch.Tensor)]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("most", [1 << 20, 1 << 10])
def test_a_gradient_is_added_as_it_lies_in_memory(monkeypatch, most):
    monkeypatch.setattr(measuring, "_MOST_ACCUMULATED", most)
    gradients = measuring._Gradients([nn.Parameter(torch.ones(64, 32, 3, 3))])
    gradient = torch.ones(64, 32, 3, 3).to(memory_format=torch.channels_last)
    with Operations() as operations:
        assert gradients.adding_ms(gradient) > 0
    ((earlier, added),) = (strides for name, strides in operations.seen if name == "aten.add_.Tensor")
    assert added == gradient.stride()
    assert earlier[1] < earlier[3] < earlier[2], "channels are last in both"
    assert not [name for name, _ in operations.seen if "clone" in name or "copy" in name]


def test_weights_of_whole_layers_are_not_copied_before_they_are_timed():
    """They would be in the processor's caches. States are copied: they stay as they are."""
    addresses: set[int] = set()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.calls: torch.Tensor
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_exporting():
                addresses.add(self.layer.weight.data_ptr())
                self.calls += 1
            return self.layer(x)

    first = Layer()
    model = nn.Sequential(first, nn.ReLU())
    trace(model, torch.randn(8, 8), whole_layers=["0"], seconds=0.1)
    assert addresses == {first.layer.weight.data_ptr()} and not first.calls
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_measuring_takes_is_known_before_times_are_measured():
    """Two values of 4 MiB at a time at least, their gradients, the weights' and the example's memory."""
    model, needed = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), []
    example = (torch.randn(4096, 256),)
    graph = measuring.measured(capture(model, example, (), False), example, (512, 4096), 0.1, needed.append)
    assert all(operator.timings for operator in graph.operators)
    assert len(needed) == 1 and 3 * (4 << 20) < needed[0] < 8 * (4 << 20)


def test_results_that_were_timed_are_gone_when_the_next_operator_runs():
    results: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_exporting():
                return self.layer(x)
            alive.extend(each() is not None for each in results)
            results[:] = [weakref.ref(result := self.layer(x))]
            return result

    trace(nn.Sequential(Layer(), Layer()), torch.randn(8, 8), whole_layers=["0", "1"], seconds=0.1)
    assert alive and not any(alive)


def test_passes_over_the_whole_model_are_repeated():
    """An operator that is repeated by itself has its weights in the processor's caches."""
    order: list[int] = []

    class Layer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.layer = number, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_exporting():
                order.append(self.number)
            return self.layer(x)

    model = nn.Sequential(Layer(0), Layer(1))
    trace(model, torch.randn(8, 8), whole_layers=["0", "1"], seconds=1000.0)
    assert order[-8:] == [0, 1] * 4


def test_costs_are_measured_and_nothing_else_changes(tmp_path):
    torch.manual_seed(0)
    model = Branches()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    graph = trace(model, EXAMPLE, seconds=0.5)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())

    by_kind = {operator.kind.split(".")[0]: operator for operator in graph.operators}
    conv = by_kind["conv2d"]
    assert graph.source == "torch.export" and graph.samples == 8
    assert conv.module == "conv" and conv.parameters == ("conv.weight", "conv.bias")
    assert [timing.samples for timing in conv.timings] == [2, 8]
    assert conv.forward_ms(8) > 0 and conv.backward_ms(8) > 0
    assert conv.held_bytes == EXAMPLE[0].numel() * 4 and conv.holds == ("image",)  # its input
    # Its backward pass gets the gradient of its output, and makes those of its weights.
    assert conv.backward_bytes >= graph.value[conv.name].bytes + 4 * model.conv.weight.numel()
    assert by_kind["batch_norm"].holds == (conv.name,)
    assert by_kind["relu_"].holds == (by_kind["relu_"].name,)
    assert by_kind["view"].within == by_kind["mean"].name
    assert graph.value[conv.name].bytes == 8 * 8 * 16 * 16 * 4 and graph.value[conv.name].per_sample
    # One tensor under two names.
    assert by_kind["linear"].parameters == by_kind["embedding"].parameters == ("embedding.weight",)
    assert by_kind["relu_"].beside == by_kind["batch_norm"].name
    assert {operator.beside for operator in graph.operators if operator.kind == "getitem"} == {
        by_kind["chunk"].name
    }
    assert not graph.value["label"].gradient and graph.value[graph.results[0]].gradient

    save(graph, tmp_path / "graph.json")
    assert load(tmp_path / "graph.json") == graph


def test_what_two_operators_hold_is_counted_once():
    linear, relu, another = trace(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(8, 64), seconds=0.2
    ).operators
    size = 8 * 64 * 4
    assert (linear.held_bytes, relu.held_bytes, another.held_bytes) == (size, size, 0)
    assert relu.holds == another.holds == (relu.name,)


def test_only_dropout_that_drops_something_draws_a_mask():
    layers = nn.Dropout(0.5), nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.Linear(64, 64)
    graph = trace(nn.Sequential(*layers), torch.randn(8, 64), seconds=0.2)
    assert [operator.module for operator in graph.operators if operator.draws_mask] == ["0"]


def test_weights_that_are_not_trained_are_not_held():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64))
    _, frozen, _ = trace(model, torch.randn(8, 64), seconds=0.2).operators
    assert frozen.held_bytes == 0


def test_what_cannot_be_traced_is_cut_between_its_layers(caplog):
    model = nn.Sequential(nn.Linear(4, 6), Undecided(), nn.Sequential(nn.Linear(6, 5), nn.ReLU()))
    graph = trace(model, torch.randn(4, 4), seconds=0.2)
    assert graph.source == "modules"
    assert [operator.module for operator in graph.operators] == ["0", "1", "2.0", "2.1"]
    assert graph.operators[0].parameters == ("0.weight", "0.bias")
    assert "It is cut between its layers only." in caplog.text
    named = trace(model, torch.randn(4, 4), whole_layers=["1"], seconds=0.2)
    assert [operator.module for operator in named.operators] == ["0", "1", "2.0", "2.1"]


@pytest.mark.parametrize(
    ("model", "example", "options", "sentence"),
    [
        (nn.Linear(4, 4), [], {}, "The example is not a tensor"),
        (nn.Linear(4, 4), (torch.ones(2, 4), torch.ones(3, 4)), {}, r"have \[2, 3\] samples"),
        (nn.Linear(4, 4), (torch.ones(2, 4), torch.ones(2)), {}, "with the 2 tensors of the example"),
        (nn.Linear(4, 4), (torch.tensor(1.0),), {}, "not a tensor with samples"),
        (nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), {"whole_layers": ["7"]}, "no layer '7'"),
        (Undecided(), torch.ones(2, 4), {}, "cannot trace the model"),
        (nn.ReLU(inplace=True), torch.ones(2, 4), {}, "changes its input"),
    ],
)
def test_mistakes_end_in_one_sentence(model, example, options, sentence):
    with pytest.raises(InvalidCall, match=sentence) as caught:
        trace(model, example, **options)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "error", [OSError("no room"), Timeout("Nobody answers.", "Wait."), KeyboardInterrupt("now")], ids=repr
)
def test_an_error_of_the_ranks_is_none_of_the_model_that_they_measure(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Rank 0 raises it at once: waiting for the others would end in another one after the whole limit."""
    run, waits = Run(), []
    monkeypatch.setattr(run, "_end_measuring", lambda *arguments: waits.append(arguments))

    def spare() -> int:
        raise error

    traced = capture(nn.Linear(4, 2), (torch.ones(8, 4),), (), False)
    with pytest.raises(type(error)) as raised:
        run.agreed(traced, (torch.ones(8, 4),), None, (8,), spare)
    assert raised.value is error
    assert not waits
