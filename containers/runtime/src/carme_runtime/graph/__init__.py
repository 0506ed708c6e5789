"""The intermediate graph of a model with its cost table: what a model computes, and what that costs.

A graph is made once, by the framework's module (`carme_runtime.torch.trace`), and read by everything that
decides about the model. It needs nothing but Python.

    graph = carme_runtime.graph.load("model.json")
    print(carme_runtime.graph.table(graph))
    Path("model.svg").write_text(carme_runtime.graph.drawing(graph))
"""

from carme_runtime.graph.files import load, save
from carme_runtime.graph.model import (
    VERSION,
    Graph,
    GraphError,
    Links,
    Operator,
    Parameter,
    Timing,
    Value,
)
from carme_runtime.graph.show import drawing, table

__all__ = [
    "VERSION",
    "Graph",
    "GraphError",
    "Links",
    "Operator",
    "Parameter",
    "Timing",
    "Value",
    "drawing",
    "load",
    "save",
    "table",
]
