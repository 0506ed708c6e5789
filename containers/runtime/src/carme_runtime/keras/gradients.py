"""Carries the gradients of Keras' torch trainer, while backpropagation runs."""

# pyright: reportMissingImports=false

from typing import Any

from carme_runtime.keras.data import Share
from carme_runtime.starts import STREAMED
from carme_runtime.torch.arrivals import Arrivals, note_arrivals
from carme_runtime.torch.options import Options
from carme_runtime.torch.parallel import Parallel


class _ParallelModel(Parallel):
    """Takes parameters in the order of the variables.

    PyTorch sorts them by paths, which hold the numbers that Keras gives layers: on a rank that has built more
    layers before, `dense_10` comes before `dense_9`, and others' `dense_1` before `dense_2`.
    """

    @staticmethod
    def parameters_of(model: Any) -> list[Any]:
        """All parameters of a model, in an order that ranks have in common."""
        places = {id(variable.value): place for place, variable in enumerate(model.variables)}
        return sorted(model.parameters(), key=lambda parameter: places.get(id(parameter), len(places)))


class Gradients:
    """The gradients of one model: its optimizer gets those of the mean loss over the global batch."""

    def __init__(self) -> None:
        self._parallel: Parallel | None = None

    def attach(self, model: Any, arrivals: Arrivals | None = None) -> set[int]:
        """Take over the parameters that the built model trains now.

        Args:
            model: Of Keras, on torch.
            arrivals: How its parameters travel already.

        Returns:
            The ids of the parameters and buffers that all ranks have got from rank 0 by this call.
        """
        if self._parallel:
            if self._parallel.covers(model):
                return set()
            self._parallel.detach()
        if arrivals:
            note_arrivals(model, arrivals)
        self._parallel = _ParallelModel(model, None, Options(start=STREAMED if arrivals else ""))
        return set() if arrivals else {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def detach(self) -> None:
        """Leave the parameters as they were before `attach`."""
        if self._parallel:
            self._parallel.detach()
        self._parallel = None

    def expect(self, share: Share) -> None:
        """The next pass is over this share."""
        assert self._parallel is not None
        self._parallel.state_share(share.samples, share.total)

    def rest(self) -> None:
        """The step is over: what a loop of the script's own makes of the model is this rank's alone."""
        assert self._parallel is not None
        self._parallel.rest()
