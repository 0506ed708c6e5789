"""What can be seen of a run while it runs: its tokens, its state, its picture."""

import os
import pickle
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from carme_runtime.petri.activation import Activation
from carme_runtime.petri.definition import Definition
from carme_runtime.petri.draw import Drawing, draw
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.live import Picture, show
from carme_runtime.petri.model import Place
from carme_runtime.petri.pool import Pool
from carme_runtime.petri.ranges import Ranges


class Observed:
    """The part of a run that changes nothing; `carme_runtime.petri.run.Run` fills its attributes."""

    net: Definition
    folder: Path
    notices: list[str]
    fired: dict[str, int]
    _lock: threading.RLock
    _activation: Activation
    _pool: Pool
    _ranges: Ranges
    _error: PetriError | None
    _rest: bool
    _closing: bool
    _pictures: list[Picture]

    def place(self, place: Place | str) -> Place:
        """The place of this name. Raises PetriError where the net has none."""
        name = place if isinstance(place, str) else place.name
        found = self.net.places.get(name)
        if found is None or (isinstance(place, Place) and found is not place):
            raise PetriError(
                f"Net {self.net.name} has no such place {name}.", f"There are {', '.join(self.net.places)}."
            )
        return found

    def marking(self) -> dict[str, list[Any]]:
        """The tokens by places. Those that a running task has taken are still there."""
        with self._lock:
            return {
                name: [pickle.loads(t.data) for t in each]
                for name, each in self._activation.marking().items()
            }

    def pickled_marking(self) -> dict[str, list[bytes]]:
        """As `marking`, for programs that have the classes of the tokens."""
        with self._lock:
            return {name: [t.data for t in tokens] for name, tokens in self._activation.marking().items()}

    def status(self) -> dict[str, Any]:
        """The state of the run in plain values: what `carme net status --json` prints.

        `state` is running, resting (nothing can start) or failed, with the `error`; `places` has numbers of
        tokens, `fired` and `running` those of tasks by transition, `ranges` bytes.
        """
        with self._lock:
            running = Counter(task.rule.transition.name for task in self._activation.running.values())
            state = "failed" if self._error else "resting" if self._rest else "running"
            return {
                "net": self.net.name,
                "folder": str(self.folder),
                "state": state,
                "error": str(self._error or ""),
                "node": socket.gethostname(),
                "process": os.getpid(),
                "workers": sum(1 for each in self._pool.connections.values() if each.process),
                "nodes": [socket.gethostname(), *(each.host for each in self._pool.members.values())],
                "places": {name: len(each) for name, each in self._activation.marking().items()},
                "fired": dict(self.fired),
                "running": dict(running),
                "ranges": {name: each.size for name, each in sorted(self._ranges.known.items())},
                "notices": list(self.notices),
                "line": self._line(),
            }

    def draw(self) -> Drawing:
        """The net as SVG with the tokens and tasks that it has now; notebooks show it."""
        return draw(self.net, self.status())

    def show(self, seconds: float = 0.5) -> None:
        """In a notebook: a picture of the net that follows the run, redrawn at most every `seconds`.

        Raises:
            PetriError: This is not a notebook.
        """
        self._pictures.append(show(self, seconds))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"image/svg+xml": self.draw(), "text/plain": self._line()}

    @property
    def workers(self) -> list[int]:
        """The processes of the workers on this node."""
        with self._lock:
            connections = self._pool.connections.values()
            return [each.process for each in connections if each.process and each.node is None]

    def _line(self) -> str:
        running = len(self._activation.running)
        places = ", ".join(f"{name} {len(tokens)}" for name, tokens in self._activation.marking().items())
        fired = ", ".join(f"{name} {count}" for name, count in self.fired.items() if count)
        return f"{self.net.name}: {running} running; ended: {fired or 'none'}; tokens: {places}"

    def _refuse_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise PetriError(
                f"The run of net {self.net.name} is closed.", f"Resume it: Net.resume({str(self.folder)!r})."
            )
