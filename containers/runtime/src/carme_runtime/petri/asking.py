"""How a process of a node asks for what the run as a whole knows of ranges, and for those of other nodes.

On each node of a job one process serves the others over an abstract Unix socket (see `serving`). A question
is a line, `KIND NAME`, and the answer is a line of JSON, so programs in any language can ask:

    fetch NAME     have the range on this node      -> [], or [what is wrong, what to do]
    copy NAME      have it on another node as well  -> "there", or "none" where there is no other
    holders NAME   where it is                      -> [node, ..., bytes], or []
    lost NAME      whether it was lost with its node -> true or false
    names          of all ranges                    -> [name, ...]
"""

import json
import os
import socket
import threading
from typing import Any

from carme_runtime.fabric.local_socket import is_own_peer
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.store import Store

#: Bytes of an abstract socket's name that the system takes.
_LONGEST = 107
_this_thread = threading.local()


def answer_here() -> None:
    """The thread that calls this answers questions: it would wait for itself if it sent some."""
    _this_thread.process = os.getpid()  # and not in what is forked from it


def address(store: Store) -> bytes:
    """Where the process listens that serves this node; `carme_ranges.h` does the same."""
    return b"\0" + os.fsencode(store.shared.name)[:_LONGEST]


def ask(store: Store, kind: str, name: str = "") -> Any:
    """The answer to a question.

    Raises:
        PetriError: The program that runs the net is gone, or a guard asks, which runs in the thread that
            answers.
    """
    if getattr(_this_thread, "process", 0) == os.getpid():
        ranges = f"range {name}, which is" if name else "ranges that are"
        raise PetriError(
            f"A guard cannot use {ranges} not on this node.",
            "Let guards depend on tokens alone: put what they need of ranges into tokens.",
        )
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(address(store))
            if not is_own_peer(connection):
                raise OSError
            connection.sendall(f"{kind} {name}\n".encode())
            with connection.makefile("rb") as answers:
                return json.loads(answers.readline())
        except (OSError, ValueError):
            raise PetriError(
                f"The ranges of other nodes cannot be reached from {store.node}.", "Resume the run."
            ) from None
