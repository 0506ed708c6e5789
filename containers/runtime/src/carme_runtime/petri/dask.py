"""Functions of a net that run on a Dask cluster: `net.start(workers=client)`.

The net's own workers are then processes that hand a task on and wait for it, one for each thread of the
cluster. Marking, journal and retries are the net's; where a function runs is Dask's to choose. Functions that
use ranges run in the net's workers, on the node that has them, and so do commands.
"""

import sys
from collections.abc import Callable
from typing import Any

from carme_runtime.petri import forwarding
from carme_runtime.petri.definition import Definition
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.model import Transition

#: The client of this process, by the address of its scheduler.
_clients: dict[str, Any] = {}


def is_client(workers: Any) -> bool:
    """Whether these workers are those of a Dask client."""
    module = sys.modules.get("distributed")
    return module is not None and isinstance(workers, module.Client)


def threads_of(client: Any) -> int:
    """Tasks that its cluster can run at once.

    Raises:
        PetriError: The net's workers, which are other processes, cannot use such a client's cluster.
    """
    if client.asynchronous:
        raise PetriError("An asynchronous Dask client cannot run a net.", "Use Client(asynchronous=False).")
    if client.scheduler.address.startswith("inproc://"):
        raise PetriError(
            "This Dask cluster is inside of this process, where the net's workers cannot reach it.",
            "Use Client(processes=True), or the address of a scheduler.",
        )
    return max(1, sum(client.nthreads().values()))


def forwarded(net: Definition, client: Any) -> Definition:
    """The net as its own workers have it, which hand what its functions do on to Dask."""
    return forwarding.forwarded(net, lambda transition: _Forwarded(transition, client))


class _Forwarded:
    """What a transition does, on Dask."""

    def __init__(self, transition: Transition, client: Any) -> None:
        self._body, self._generates = transition.body, transition.generates
        self._name = transition.name
        self._address, self._security = client.scheduler.address, client.security

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run it, and wait for what it gives."""
        client = _client(self._address, self._security)
        call = _by_value(forwarding.call_all if self._generates else _call)
        future = client.submit(call, self._body, arguments, keywords, key=None, pure=False)
        try:
            return future.result()
        finally:
            future.release()


def _client(address: str, security: Any) -> Any:
    if address not in _clients:
        from distributed import Client  # pyright: ignore[reportMissingImports]

        _clients[address] = Client(address, security=security, set_as_default=False)
    return _clients[address]


def _by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """So that the cluster needs no carme_runtime of its own."""
    import cloudpickle  # pyright: ignore[reportMissingImports]

    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    return function


def _call(body: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return body(*arguments, **keywords)
