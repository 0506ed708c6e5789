"""The cluster as the portal shows it: what is free, and what a session may ask for."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.conf import settings

from carme.broker import BrokerClient
from carme.broker.protocol import Failure
from carme.errors import CarmeError
from carme.images import Image, ImageCatalogue
from carme.jobs import Access, Cluster, Forecast, Job, JobRequest, Reservation, partition_of, usable
from carme.jobs.access import partition_refusal
from carme.jobs.nodes import expand
from carme_webui.caches import cached_by_arguments

__all__ = [
    "Picture",
    "Supply",
    "access_of",
    "broker",
    "entry_points",
    "fitted",
    "images",
    "picture",
    "supplies",
]


@dataclass(frozen=True)
class Supply:
    """The GPUs of one type: free now and in all, and on one node at most."""

    kind: str
    free: int
    total: int
    per_node: int


# What the portal asks, the broker answers from memory or after one look at accounting.
BROKER_TIMEOUT = 10.0


def broker() -> BrokerClient:
    """The broker of this site."""
    return BrokerClient(settings.SITE.broker.socket, timeout=BROKER_TIMEOUT)


#: Seconds for which the calendar shows the same running jobs.
JOBS_SECONDS = 10.0


class Picture:
    """What the broker said a moment ago, for pages that only show it.

    However many pages are made, each question is asked once in the time between two looks at Slurm: the
    broker itself knows nothing newer. While it is asked again, other pages show what was said before. Who
    decides something asks `broker()`.

    Attributes:
        seconds: How long an answer is shown; None: as long as the broker looks away.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        # Until when it is new, what was said, and what was refused.
        self._known: dict[str, tuple[float, Any, Failure | None]] = {}
        self._running: tuple[list[Job], list[tuple[Job, list[str]]]] = [], []
        self._asking = {name: threading.Lock() for name in ("cluster", "forecast", "jobs", "reservations")}

    def cluster(self) -> Cluster:
        """Partitions and nodes. Raises CarmeError, as the broker does; so do the others."""
        return self._seen("cluster", lambda: broker().cluster())

    def forecast(self) -> Forecast:
        """How many GPUs will be free."""
        return self._seen("forecast", lambda: broker().forecast())

    def jobs(self) -> list[Job]:
        """All that wait or run; not to be changed. They may be thousands: they are asked for less often."""
        return self._seen("jobs", lambda: broker().jobs(), least=JOBS_SECONDS)

    def running(self) -> list[tuple[Job, list[str]]]:
        """Those of the jobs that run, with their nodes' names, which are read once for many pages."""
        jobs = self.jobs()
        if self._running[0] is not jobs:
            self._running = jobs, [(job, expand(job.node_list)) for job in jobs if job.is_running]
        return self._running[1]

    def reservations(self) -> list[Reservation]:
        """Slurm's; not to be changed."""
        return self._seen("reservations", lambda: broker().reservations())

    def _seen(self, name: str, ask: Callable[[], Any], least: float = 0.0) -> Any:
        saved = max(settings.SITE.slurm.poll_seconds, least) if self.seconds is None else self.seconds
        until, value, failure = self._known.get(name, (0.0, None, None))
        now = time.monotonic()
        if now >= until:
            # Who has nothing that is nearly new waits for who is asking.
            turn = self._asking[name]
            if turn.acquire(blocking=now >= until + saved):
                try:
                    until, value, failure = self._known.get(name, (0.0, None, None))
                    if time.monotonic() >= until:
                        value, failure = _answer(ask)
                        self._known[name] = time.monotonic() + saved, value, failure
                finally:
                    turn.release()
        if failure is not None:
            raise failure.error()
        return value


def _answer(ask: Callable[[], Any]) -> tuple[Any, Failure | None]:
    try:
        return ask(), None
    except CarmeError as error:
        return None, Failure.of(error)


picture = Picture()
"""The picture of this process."""


#: Seconds for which a process shows what somebody may use as it was; the broker itself asks once a minute.
ACCESS_SECONDS = 10.0
#: Users that are remembered.
MOST_USERS = 1024
_accesses: dict[str, tuple[float, Access]] = {}


def access_of(user: str, *, anew: bool = False) -> Access:
    """What Slurm lets somebody use, as it was a moment ago; empty while nobody answers.

    Args:
        anew: Ask, whatever is remembered.
    """
    until, found = _accesses.get(user, (0.0, Access(user=user)))
    if anew or time.monotonic() >= until:
        try:
            found = broker().access(user=user)
        except CarmeError:
            found = Access(user=user)
        if len(_accesses) >= MOST_USERS:
            _accesses.clear()
        _accesses[user] = time.monotonic() + ACCESS_SECONDS, found
    return found


def entry_points(image: Image) -> dict[str, str]:
    """What an image can open, with titles; an image that names nothing has JupyterLab."""
    return image.entry_points or {"lab": "JupyterLab"}


def images() -> ImageCatalogue:
    """The images of this site."""
    return ImageCatalogue(settings.SITE.images.directory)


@cached_by_arguments
def supplies(cluster: Cluster) -> list[Supply]:
    """The GPUs of the cluster by type. Those of nodes that take no jobs are not free."""
    kinds = sorted({kind for node in cluster.nodes for kind in node.gpus})
    return [
        Supply(
            kind=kind,
            free=sum(
                max(0, node.gpus.get(kind, 0) - node.gpus_used.get(kind, 0))
                for node in cluster.nodes
                if node.available
            ),
            total=sum(node.gpus.get(kind, 0) for node in cluster.nodes),
            per_node=max(node.gpus.get(kind, 0) for node in cluster.nodes),
        )
        for kind in kinds
    ]


def fitted(request: JobRequest, cluster: Cluster, user: str, cpus: int, memory_mb: int) -> JobRequest:
    """A job that the portal itself has somebody run, where Slurm takes it, with no more than nodes have.

    Args:
        cpus: Processors that it is to have.
        memory_mb: Its memory, in MiB.

    Raises:
        InvalidRequest: There is no partition for it.
    """
    request = _placed(request, cluster, access_of(user))
    partition = partition_of(request, cluster, settings.SITE)
    nodes = [node for node in cluster.nodes if node.name in set(partition.node_names)]
    return request.model_copy(
        update={
            "cpus_per_node": min([cpus, *(node.cpus for node in nodes)]),
            "memory_mb_per_node": min([memory_mb, *(node.memory_mb for node in nodes)]),
            "minutes": min(filter(None, [request.minutes, partition.max_minutes])),
        }
    )


def _placed(request: JobRequest, cluster: Cluster, access: Access) -> JobRequest:
    """The job in the first partition that takes it, with the first of the user's accounts if need be."""
    account = request.account or settings.SITE.slurm.default_account
    first = partition_of(request, cluster, settings.SITE)
    mine = [one for one in usable(cluster, access).partitions if one.state == "UP" and one.node_names]
    payers: list[str | None] = [account, *([] if request.account else access.accounts)]
    for payer in payers:
        for partition in [first, *mine]:
            if partition_refusal(partition, access, payer, request.qos) is None:
                if partition == first and payer == account:
                    return request
                return request.model_copy(update={"partition": partition.name, "account": payer})
    return request  # the broker says why not
