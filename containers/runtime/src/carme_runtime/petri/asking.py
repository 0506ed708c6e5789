"""How a process of a node asks for what the run as a whole knows of ranges, and for those of other nodes.

On each node of a job one process serves the others over an abstract Unix socket (see `serving`). A question
is a line, `KIND NAME`, and the answer is a line of JSON, so programs in any language can ask:

    fetch NAME     have the range on this node      -> [], or [what is wrong, what to do]
    copy NAME      have it on another node as well  -> "there", or "none" where there is no other
    holders NAME   where it is                      -> [node, ..., bytes], or []
    names          of all ranges                    -> [name, ...]
"""

import json
import socket
from typing import Any

from carme_runtime.fabric.local_socket import is_own_peer
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.store import Store


def address(store: Store) -> str:
    """Where the process listens that serves this node."""
    return f"\0{store.shared.name}"


def ask(store: Store, kind: str, name: str = "") -> Any:
    """The answer to a question.

    Raises:
        PetriError: The program that runs the net is gone.
    """
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
