"""Parameters that were frozen when a pipeline was made, and are trained later."""

# As in backend.py.
# pyright: reportMissingImports=false

import dataclasses
from collections.abc import Iterable, Set

from torch import nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.graph import Graph


class Frozen:
    """Of a model in pieces: sees when gradients would be lost between them.

    Args:
        graph: Of the model.
        sent: Values that pass between pieces. Which gradients come back for them was settled when the
            pipeline was made.
    """

    def __init__(self, graph: Graph, sent: Iterable[str]) -> None:
        self._graph = graph
        self._without = [name for name in sent if not graph.value[name].gradient]
        self._frozen = {parameter.name for parameter in graph.parameters if not parameter.trainable}
        self._harmless = frozenset[str]()

    def check(self, model: nn.Module) -> None:
        """Raise InvalidCall where a parameter is trained now whose gradient needs others that do not come."""
        if not self._frozen or not self._without:
            return
        trained = frozenset(n for n, p in model.named_parameters() if p.requires_grad and n in self._frozen)
        if trained <= self._harmless:
            return
        if self._loses(trained):
            first = next(name for name in sorted(trained) if self._loses({name}))  # others may do no harm
            raise InvalidCall(
                f"{first} was frozen when pipeline() was called, and is trained now. Stages behind it "
                "send no gradients for it.",
                "Let it require gradients before pipeline() is called, or make the pipeline anew.",
            )
        self._harmless = trained

    def _loses(self, trained: Set[str]) -> bool:
        """Whether one of these parameters needs a gradient that does not come."""
        parameters = tuple(
            dataclasses.replace(each, trainable=each.trainable or each.name in trained)
            for each in self._graph.parameters
        )
        reached = dataclasses.replace(self._graph, parameters=parameters).with_gradients
        return any(name in reached and "float" in self._graph.value[name].dtype for name in self._without)
