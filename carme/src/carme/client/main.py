"""The client."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from carme import api
from carme.client.admin import Admin
from carme.client.bookings import Bookings
from carme.client.connection import Connection, Login, trusting
from carme.client.files import Files
from carme.client.images import Images
from carme.client.jobs import Array, Job, JobOptions, Jobs
from carme.client.personal import Notices, Presets
from carme.client.projects import Projects
from carme.client.sessions import Sessions

__all__ = ["Client"]

Value = TypeVar("Value")


class Client:
    """One portal, used with a personal token.

    Args:
        url: The portal's address; by default that of `carme login` or `CARME_URL`.
        token: By default that of `carme login` or `CARME_TOKEN`.
        verify: Whether to check the portal's certificate, or how; by default as set by `carme login --ca`.

    Raises:
        ConfigError: There is no address or token.

    Every method raises what the portal refuses, in its words: `InvalidRequest` with `field`, `Denied`,
    `NotFound`, `SlurmError`, `BrokerUnavailable`; and `Unreachable` when it does not answer.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, verify: bool | ssl.SSLContext = True
    ) -> None:
        if url is None or token is None:
            known = Login().read()
            url, token = url or known[0], token or known[1]
        if verify is True and (authority := Login().authority(url)):
            verify = trusting(authority)
        self.connection = Connection(url, token, verify)
        self.jobs = Jobs(self.connection)
        self.sessions = Sessions(self.connection)
        self.bookings = Bookings(self.connection)
        #: Called, it lists what sessions and jobs can run in.
        self.images = Images(self.connection)
        self.files = Files(self.connection)
        self.presets = Presets(self.connection)
        self.notices = Notices(self.connection)
        #: Called, it lists mine.
        self.projects = Projects(self.connection)
        self.admin = Admin(self.connection)

    def submit(
        self,
        what: Callable[..., Value] | str | Path | list[str],
        /,
        *arguments: Any,
        named: dict[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Start a batch job; see `Jobs.submit`."""
        return self.jobs.submit(what, *arguments, named=named, **options)

    def array(
        self, what: str | Path | list[str], tasks: str, /, *arguments: Any, **options: Unpack[JobOptions]
    ) -> Array:
        """Start a script or a command as an array; see `Jobs.array`."""
        return self.jobs.array(what, tasks, *arguments, **options)

    def map(
        self,
        function: Callable[..., Value],
        /,
        *arguments: Iterable[Any],
        at_once: int | None = None,
        named: dict[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> Array:
        """Call a function for each item, in the tasks of an array; see `Jobs.map`."""
        return self.jobs.map(function, *arguments, at_once=at_once, named=named, **options)

    def profile(self) -> api.Account:
        """Whose token this is, and what it allows."""
        return api.Account.model_validate(self.connection.ask("GET", "profile"))

    def cluster(self) -> api.Overview:
        """Partitions, nodes, and the GPUs that are free now."""
        return api.Overview.model_validate(self.connection.ask("GET", "cluster"))

    def close(self) -> None:
        """Close its connections."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
