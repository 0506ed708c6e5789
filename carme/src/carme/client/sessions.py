"""Sessions from a program."""

from __future__ import annotations

from collections.abc import Sequence

from carme import api
from carme.client.connection import Connection
from carme.client.pages import items
from carme.client.remote_object import RemoteObject, wait_until
from carme.errors import CarmeError
from carme.scaling import Prediction
from carme.sessions import SessionState
from carme.translation import joined, message

__all__ = ["Session", "Sessions"]

PAUSES = 0.5, 5.0  # seconds between two requests about a session: the first ones, and the longest


class Session(RemoteObject[api.SessionOut]):
    """A session of mine."""

    def __repr__(self) -> str:
        return f"<Session {self.name} {self._known.state}>"

    @property
    def name(self) -> str:
        """What the portal knows it by."""
        return self._known.name

    def info(self) -> api.SessionOut:
        """How it stands now."""
        if self._known.state is not SessionState.ENDED:
            self._is(self._connection.ask("GET", f"sessions/{self.name}"))
        return self._known

    @property
    def state(self) -> SessionState:
        """Its state now."""
        return self.info().state

    def wait(self, timeout: float | None = None) -> api.SessionOut:
        """Wait until it is ready; `apps` then has the addresses to open.

        Raises:
            CarmeError: It ended instead; the error says why.
            TimeoutError: It is not ready after `timeout` seconds.
        """
        wait_until(
            self._is_ready,
            lambda: f"The session {self.name} is not ready after {timeout:g} s: {self._known.label}.",
            timeout,
            *PAUSES,
        )
        return self._known

    def _is_ready(self) -> bool:
        """Raises CarmeError: It has ended."""
        info = self.info()
        if info.state is SessionState.ENDED:
            why = joined([f"{info.label}.", info.explanation])  # in this reader's language
            raise CarmeError(message("The session {name} ended: {why}", name=self.name, why=why))
        return info.state is SessionState.READY

    def extend(self, minutes: int) -> api.Extended:
        """Give it more time; when it ends now."""
        found = self._connection.ask("POST", f"sessions/{self.name}/extend", {"minutes": minutes})
        return api.Extended.model_validate(found)

    def stop(self) -> None:
        """End it."""
        self._is(self._connection.ask("DELETE", f"sessions/{self.name}"))


class Sessions:
    """My sessions."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def start(
        self,
        image: str,
        *,
        minutes: int,
        gpus: int = 0,
        nodes: int = 1,
        gpu_type: str | None = None,
        cpus: int | None = None,
        memory_mb: int | None = None,
        partition: str | None = None,
        reservation: str | None = None,
        title: str = "",
        app: str = "lab",
        account: str | None = None,
        qos: str | None = None,
        stage: Sequence[str] = (),
        results: str | None = None,
        prediction: Prediction | None = None,
    ) -> Session:
        """Start a session.

        Args:
            image: What it runs in; see `Client.images`.
            minutes: How long.
            gpus: On each node.
            cpus: Processors on each node; None: the share of its GPUs.
            memory_mb: Memory on each node, in MiB; None: the share of its GPUs.
            reservation: The name of the booking to run in.
            app: What to open in it.
            account: Slurm's account that pays; a project's is its `account`.
            qos: Slurm's quality of service; None: that of the account.
            stage: What is brought to its nodes before it begins: datasets, or absolute paths of the cluster,
                with `local:` (default), `scratch:` or `ram:` in front.
            results: The folder of the cluster to which what it leaves in `CARME_RESULTS` is copied.
            prediction: What a probe's result says of these nodes and GPUs: `carme.scaling.Curve.prediction`.

        Raises:
            InvalidRequest: With the field, and what is possible.
        """
        sent = {"image": image, "minutes": minutes, "gpus_per_node": gpus, "nodes": nodes, "title": title}
        sent |= {"gpu_type": gpu_type, "partition": partition, "reservation": reservation, "app": app}
        sent |= {"cpus_per_node": cpus, "memory_mb_per_node": memory_mb}
        sent |= {"account": account, "qos": qos, "stage": list(stage), "results": results}
        sent |= {"prediction": prediction and prediction.model_dump()}
        return self._session(self._connection.ask("POST", "sessions", sent))

    def get(self, name: str) -> Session:
        """One of my sessions. Raises NotFound."""
        return self._session(self._connection.ask("GET", f"sessions/{name}"))

    def list(self, *, active: bool | None = True, limit: int | None = 50) -> list[Session]:
        """My sessions, newest first.

        Args:
            active: Those that are not over, those that are, or all (None).
            limit: How many at most; None: all.
        """
        return [self._session(item) for item in items(self._connection, "sessions", limit, active=active)]

    def _session(self, found: object) -> Session:
        return Session(self._connection, api.SessionOut.model_validate(found))
