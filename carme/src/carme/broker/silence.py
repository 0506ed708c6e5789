"""A broker that accepts connections and answers nothing, and why a broker cannot be reached."""

import contextlib
import select
import socket as sockets
import time
from pathlib import Path

from carme.errors import BrokerTimeout, BrokerUnavailable
from carme.translation import message as _

__all__ = ["Silence", "unreachable"]


def unreachable(
    socket: Path, why: object, kind: type[BrokerUnavailable] = BrokerUnavailable
) -> BrokerUnavailable:
    """The error that says why a broker cannot be reached."""
    return kind(
        _("The broker at {socket} does not answer: {why}.", socket=socket, why=why),
        _("Try again in a moment; an administrator finds the cause with 'systemctl status carme-broker'."),
    )


class Silence:
    """Gives up a broker that hangs, for all clients of a process that share this, also in several threads.

    Some requests take long, because the broker asks Slurm. So a client that waits checks whether the broker
    is there: it closes an empty connection at once, whatever else it does. If it does not, the client gives
    up, and for a while nobody sends a request.

    Args:
        patience: Seconds without an answer before the check.
        check_seconds: Seconds that the broker gets to close an empty connection.
        rest: Seconds after a check that failed in which requests fail at once. The next one checks first.
    """

    def __init__(self, patience: float, check_seconds: float, rest: float) -> None:
        self.patience, self.check_seconds, self.rest = patience, check_seconds, rest
        #: When the next request may check, by the monotonic clock; None: the broker answers.
        self._silent_until: float | None = None

    def check(self, socket: Path) -> None:
        """Before a request: see that the broker is there if it was not the last time.

        Raises:
            BrokerUnavailable: It still hangs, so that nothing should be sent.
            OSError: There is no broker.
        """
        until = self._silent_until
        if until is not None and (time.monotonic() < until or not self._is_there(socket)):
            raise unreachable(socket, _("it took too long"))

    def wait(self, connection: sockets.socket, socket: Path, seconds: float = 0.0) -> None:
        """After a request: wait until its answer begins, for as long as the broker is there.

        Args:
            seconds: For which the request itself has the broker wait.

        Raises:
            BrokerTimeout: The broker hangs, or has just gone; it may still do what was requested.
        """
        answer = select.poll()
        answer.register(connection, select.POLLIN)
        if answer.poll(1000 * (self.patience + seconds)):
            self._silent_until = None
        else:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                if self._is_there(socket):
                    return
            raise unreachable(socket, _("it took too long"), BrokerTimeout)

    def _is_there(self, socket: Path) -> bool:
        """Whether the broker closes an empty connection; if not, requests rest from now on.

        Raises:
            OSError: There is no broker, which a request notices at once: none has to rest.
        """
        try:
            with sockets.socket(sockets.AF_UNIX) as probe:
                probe.settimeout(self.check_seconds)
                probe.connect(str(socket))
                probe.shutdown(sockets.SHUT_WR)
                probe.recv(1)
        except ConnectionResetError:
            pass  # it closes at once what is too many connections
        except (FileNotFoundError, ConnectionRefusedError):
            self._silent_until = None
            raise
        except OSError:
            self._silent_until = time.monotonic() + self.rest
            return False
        self._silent_until = None
        return True
