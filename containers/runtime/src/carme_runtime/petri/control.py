"""A run's door for other programs of its user on the same node: its state, and new tokens.

An abstract Unix socket, so nothing of it stays when the program is killed. Both ends see by the kernel's word
that the other one is of the same user before they read anything.
"""

import contextlib
import json
import os
import pickle
import socket
import threading
import weakref
from pathlib import Path, PurePath
from typing import Any, Protocol

from carme_runtime.fabric.local_socket import is_own_peer
from carme_runtime.petri import forks
from carme_runtime.petri.channel import Reader, encode
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.frames import header_of
from carme_runtime.petri.memory import Memory, Range, handed_over
from carme_runtime.petri.model import Place

_SOCKETS = Path("/proc/net/unix")


def address(identity: str) -> str:
    """Where the run of this identity is reached."""
    return f"\0carme-net-{os.getuid()}-{identity}"


def identities() -> list[str]:
    """Of the runs of this user that go on on this node."""
    prefix = "@" + address("")[1:]
    with contextlib.suppress(OSError):
        words = {line.split()[-1] for line in _SOCKETS.read_text().splitlines()[1:]}
        return sorted(word.removeprefix(prefix) for word in words if word.startswith(prefix))
    return []


class Served(Protocol):
    """What other programs may do with a run (`carme_runtime.petri.run.Run`).

    Attributes:
        notices: What happened that is worth a sentence.
        memory: The run's ranges.
    """

    notices: list[str]

    @property
    def memory(self) -> Memory: ...

    def place(self, place: Place | str) -> Place:
        """The place of this name. Raises PetriError where the net has none."""
        ...

    def put(self, place: Place | str, *tokens: Any) -> None:
        """Put tokens into a place. Raises PetriError where that is not possible."""
        ...

    def status(self) -> dict[str, Any]:
        """The state of the run in plain values."""
        ...

    def pickled_marking(self) -> dict[str, list[bytes]]:
        """All tokens by place."""
        ...


class Door:
    """Serves other programs in threads of its own."""

    def __init__(self, run: Served, identity: str) -> None:
        self._reference = weakref.ref(run)  # who waits here does not keep a run that nobody has any more
        self._server = socket.socket(socket.AF_UNIX)
        forks.open_descriptors.add(self._server.fileno())
        try:
            self._server.bind(address(identity))
            self._server.listen()
        except OSError as error:  # the run goes on without it
            run.notices.append(f"Other programs cannot attach: {error.strerror}.")
            return
        threading.Thread(target=self._accept, name="carme-petri-door", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        forks.open_descriptors.discard(self._server.fileno())
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    @property
    def _run(self) -> Served:
        if (run := self._reference()) is None:
            raise PetriError("The run is being closed.", "Resume it when it is.")
        return run

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        reader = Reader()
        forks.open_descriptors.add(client.fileno())
        try:
            with contextlib.suppress(OSError):
                while is_own_peer(client) and (data := client.recv(1 << 16)):
                    for request in reader.feed(data):
                        client.sendall(encode(self._answer(request)))
        finally:
            forks.open_descriptors.discard(client.fileno())
            client.close()

    def _answer(self, request: tuple[Any, ...]) -> tuple[Any, ...]:
        try:
            return "done", self._do(*request)
        except PetriError as error:
            return "refused", error.message, error.remedy
        except Exception as error:
            return "refused", f"{type(error).__name__}: {error}.", "Use the same version of carme_runtime."

    def _do(self, kind: str, *arguments: Any) -> Any:
        if kind == "status":
            return self._run.status()
        if kind == "marking":
            return self._run.pickled_marking()
        if kind == "put":
            place, tokens = arguments
            self._run.put(place, *map(pickle.loads, tokens))
        elif kind == "put text":
            name, texts = arguments
            place = self._run.place(name)
            self._run.put(place, *(from_text(place, text, self._run) for text in texts))
        else:
            raise PetriError(f"Nobody knows here what '{kind}' is.", "Use the same version of carme_runtime.")
        return None


class Attached:
    """A run that another program of this user on this node has.

    Args:
        folder: Of the run.

    Raises:
        PetriError: No program has it now, or one on another node.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder)
        if not (path / "journal").exists():
            raise PetriError(f"There is no run in {path}.", "Name the folder that run.folder holds.")
        header = header_of(path / "journal")
        self._connect((header.get("memory") or {}).get("identity", ""), str(path), header.get("node", ""))

    @classmethod
    def to(cls, identity: str) -> "Attached":
        """The run of an identity. Raises PetriError where it has ended."""
        running = cls.__new__(cls)
        running._connect(identity, "", "")
        return running

    def _connect(self, identity: str, name: str, node: str) -> None:
        self._reader = Reader()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(address(identity))
            if not is_own_peer(self._socket):
                raise OSError
        except OSError:
            self._socket.close()
            where = f", or one on {node}" if node not in ("", socket.gethostname()) else ""
            raise PetriError(
                f"No program runs the net of {name or identity} now{where}.",
                f"Resume it: carme net resume {name}." if name else "Name the folder of its run.",
            ) from None

    def status(self) -> dict[str, Any]:
        """What `run.status()` says."""
        return self._ask("status")

    def put(self, place: Place | str, *tokens: Any) -> None:
        """Put tokens into a place of the run, as `run.put` does. Raises PetriError as that does."""
        name = place if isinstance(place, str) else place.name
        with handed_over():
            data = [pickle.dumps(token, 5) for token in tokens]
        self._ask("put", name, data)

    def put_text(self, place: str, *texts: str) -> None:
        """Put tokens that are written as text, by the type of the place. Raises PetriError as `put` does."""
        self._ask("put text", place, list(texts))

    def marking(self) -> dict[str, list[Any]]:
        """All tokens by place, as `run.marking()` has them."""
        return {name: [pickle.loads(each) for each in data] for name, data in self._ask("marking").items()}

    def close(self) -> None:
        """Let go; the run goes on."""
        self._socket.close()

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, *request: Any) -> Any:
        answers: list[Any] = []
        with contextlib.suppress(OSError):
            self._socket.sendall(encode(request))
            while not answers and (data := self._socket.recv(1 << 18)):
                answers = self._reader.feed(data)
        if not answers:
            raise PetriError("The program that ran the net has ended.", "See carme net status.")
        if answers[0][0] == "refused":
            raise PetriError(*answers[0][1:])
        return answers[0][1]


def from_text(place: Place, text: str, run: Served) -> Any:
    """A token that a person has written.

    Raises:
        PetriError: It is none of the place's type.
    """
    kind: Any = place.type
    if kind is Range:
        return run.memory.open(text)
    try:
        if kind is bytes:
            return text.encode()
        if kind in (str, int, float) or issubclass(kind, PurePath):
            return kind(text)
        if kind is object:
            with contextlib.suppress(ValueError):
                return json.loads(text)
            return text
        if kind in (bool, list, dict, tuple, set, type(None)):
            value = json.loads(text)
            return kind(value) if kind in (tuple, set) and isinstance(value, list) else value
    except ValueError:
        raise PetriError(
            f"'{text}' is not of type {kind.__name__}, and place {place.name} holds those.",
            "Write numbers plainly, and lists and dictionaries as JSON.",
        ) from None
    raise PetriError(
        f"A {kind.__name__} for place {place.name} cannot be written as text.",
        "Put it with Python: Net.attach(folder).put(place, token).",
    )
