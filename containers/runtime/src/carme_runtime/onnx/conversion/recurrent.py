"""GRU and LSTM, and the choice between two graphs.

Gates stand in ONNX's order: update, reset, hidden for GRU; input, output, forget, cell for LSTM.
"""

from collections.abc import Callable
from typing import Any

import torch

from carme_runtime.onnx.conversion.table import Node, operator
from carme_runtime.onnx.errors import OnnxError


def _checked(node: Node, usual: list[str]) -> None:
    activations = node.get("activations", usual)
    directions = 2 if node.get("direction", "forward") == "bidirectional" else 1
    plain = [each.lower() for each in activations] == [each.lower() for each in usual] * (
        len(activations) // len(usual)
    )
    if not plain or len(activations) not in (len(usual), directions * len(usual)) or node.get("clip"):
        raise OnnxError(f"Node {node.name} is a {node.kind} with its own activations.", "Export it without.")


def _over_time(
    node: Node, x: torch.Tensor, count: int, run: Callable[[int, list[torch.Tensor]], list[torch.Tensor]]
) -> torch.Tensor:
    """Run each direction over the steps of time: results of shape (time, directions, batch, hidden)."""
    if node.get("layout", 0):
        raise OnnxError(f"Node {node.name} has its batch first.", "Export it with layout 0.")
    reverse = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    outputs_of_steps = []
    for direction, backwards in enumerate(reverse[node.get("direction", "forward")]):
        steps = list(x.unbind(0))
        results = run(direction, steps[::-1] if backwards else steps)
        outputs_of_steps.append(torch.stack(results[::-1] if backwards else results))
    return torch.stack(outputs_of_steps, 1)


def _refuse_lengths(node: Node, lengths: Any, x: torch.Tensor) -> None:
    if lengths is not None and not bool((lengths == x.shape[0]).all()):
        raise OnnxError(
            f"Node {node.name} has sequences of different lengths.", "Give sequences of one length."
        )


@operator("GRU")
def gru(
    node: Node, x: Any, w: Any, r: Any, bias: Any = None, lengths: Any = None, start: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    _checked(node, ["Sigmoid", "Tanh"])
    _refuse_lengths(node, lengths, x)
    hidden, after = r.shape[-1], node.get("linear_before_reset", 0)
    ends: list[torch.Tensor] = []

    def run(direction: int, steps: list[torch.Tensor]) -> list[torch.Tensor]:
        input_bias, state_bias = (
            bias[direction].split(3 * hidden) if bias is not None else (0.0, x.new_zeros(3 * hidden))
        )
        state = start[direction] if start is not None else x.new_zeros(x.shape[1], hidden)
        rz, rr, rh = r[direction].split(hidden)
        bz, br, bh = state_bias.split(hidden)
        results = []
        for step in steps:
            xz, xr, xh = (step @ w[direction].t() + input_bias).split(hidden, -1)
            update = torch.sigmoid(xz + state @ rz.t() + bz)
            reset = torch.sigmoid(xr + state @ rr.t() + br)
            inner = reset * (state @ rh.t() + bh) if after else (reset * state) @ rh.t() + bh
            state = (1 - update) * torch.tanh(xh + inner) + update * state
            results.append(state)
        ends.append(state)
        return results

    by_time = _over_time(node, x, 3, run)
    return by_time, torch.stack(ends)


@operator("LSTM")
def lstm(
    node: Node,
    x: Any,
    w: Any,
    r: Any,
    bias: Any = None,
    lengths: Any = None,
    start: Any = None,
    cell_start: Any = None,
    peepholes: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _checked(node, ["Sigmoid", "Tanh", "Tanh"])
    _refuse_lengths(node, lengths, x)
    if peepholes is not None or node.get("input_forget", 0):
        raise OnnxError(
            f"Node {node.name} is an LSTM with peepholes or coupled gates.", "Export a plain one."
        )
    hidden = r.shape[-1]
    ends: list[torch.Tensor] = []
    cells: list[torch.Tensor] = []

    def run(direction: int, steps: list[torch.Tensor]) -> list[torch.Tensor]:
        bias_sum = sum(bias[direction].split(4 * hidden)) if bias is not None else 0.0
        zeros = x.new_zeros(x.shape[1], hidden)
        state = start[direction] if start is not None else zeros
        cell = cell_start[direction] if cell_start is not None else zeros
        results = []
        for step in steps:
            gates = step @ w[direction].t() + state @ r[direction].t() + bias_sum
            i, o, f, c = gates.split(hidden, -1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(c)
            state = torch.sigmoid(o) * torch.tanh(cell)
            results.append(state)
        ends.append(state)
        cells.append(cell)
        return results

    by_time = _over_time(node, x, 4, run)
    return by_time, torch.stack(ends), torch.stack(cells)
