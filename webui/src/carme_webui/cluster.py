"""The cluster as the portal shows it: what is free, and what a session may ask for."""

import itertools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from django.conf import settings
from django.core.cache import caches

from carme.bookings.reconcile import is_ours
from carme.broker import BrokerClient, LastAnswers
from carme.broker.protocol import Failure, RunningJob
from carme.broker.silence import Silence
from carme.errors import CarmeError
from carme.images import Image, ImageCatalogue
from carme.jobs import Access, Cluster, Forecast, JobRequest, Reservation, partition_of, usable
from carme.jobs.access import partition_refusal
from carme.jobs.nodes import expand
from carme_webui.caches import derived

__all__ = [
    "ClusterCache",
    "Reservations",
    "RunningJobs",
    "Supply",
    "access_of",
    "broker",
    "broker_silence",
    "cluster_cache",
    "entry_points",
    "fitted",
    "images",
    "shown_seconds",
    "supplies",
]


T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Supply:
    """The GPUs of one type: free now and in all, and on one node at most."""

    kind: str
    free: int
    total: int
    per_node: int


# What the portal asks, the broker answers from memory or after one look at accounting.
BROKER_TIMEOUT = 10.0

#: In seconds: a page waits for a broker that hangs as long as the first two together, and for the third no
#: page does.
broker_silence = Silence(patience=1.5, check_seconds=1.0, rest=5.0)


def broker(answers: LastAnswers | None = None) -> BrokerClient:
    """The broker of this site.

    Args:
        answers: Its earlier ones, which are not read again while they stay the same.
    """
    return BrokerClient(settings.SITE.broker.socket, BROKER_TIMEOUT, answers, broker_silence)


#: Seconds for which the calendar shows the same running jobs.
JOBS_SECONDS = 10.0

#: What a large site's broker takes long to answer, and the portal long to read, is requested less often: so
#: many times as long after an answer as that took, but no later than after so many seconds. The broker looks
#: at the nodes no more often than that.
REST_TIMES = 20.0
REST_SECONDS = 5.0
#: For so many seconds a page waits for a new answer while there is one of a moment ago.
WAIT_SECONDS = 0.02
#: For what took so many seconds it does not wait at all: with 5,000 nodes and 50,000 jobs (`./test bench
#: scale`) that is 0.1 to 0.2 s, and a short question may have to wait for the broker as long.
SLOW_SECONDS = 0.05


_numbers = itertools.count()


class RunningJobs(list[tuple[RunningJob, list[str]]]):
    """The jobs that run, with their nodes' names. Nobody changes it, so that others can be derived of it.

    Attributes:
        number: Which no other list of this process has.
    """

    def __init__(self, jobs: Iterable[tuple[RunningJob, list[str]]] = ()) -> None:
        super().__init__(jobs)
        self.number = next(_numbers)

    def on_node(self, name: str) -> list[RunningJob]:
        """Those on a node."""
        return derived.get(self, "on nodes", _by_node).get(name, [])

    def of_user(self, name: str) -> list[tuple[RunningJob, list[str]]]:
        """Those of a user, with their nodes' names."""
        return derived.get(self, "of users", _by_user).get(name, [])


class Reservations(list[Reservation]):
    """Slurm's reservations. Nobody changes the list.

    Attributes:
        number: Which no other list of this process has.
        of_others: Those that belong to no booking.
    """

    def __init__(self, reservations: Iterable[Reservation] = ()) -> None:
        super().__init__(reservations)
        self.number = next(_numbers)
        self.of_others = [reservation for reservation in self if not is_ours(reservation.name)]


def _by_node(jobs: Iterable[tuple[RunningJob, list[str]]]) -> dict[str, list[RunningJob]]:
    found: dict[str, list[RunningJob]] = {}
    for job, names in jobs:
        for name in names:
            found.setdefault(name, []).append(job)
    return found


def _by_user(
    jobs: Iterable[tuple[RunningJob, list[str]]],
) -> dict[str, list[tuple[RunningJob, list[str]]]]:
    found: dict[str, list[tuple[RunningJob, list[str]]]] = {}
    for job, names in jobs:
        found.setdefault(job.user, []).append((job, names))
    return found


class ClusterCache:
    """What the broker reported a moment ago, for pages that only show it, not for decisions.

    Each process asks once in the time between two polls of Slurm, as the broker itself knows nothing newer,
    and less often on large sites. It asks beside the pages: they show the earlier answer where the new
    answer does not come at once. A refusal is cached as well. Where pages ask the broker each time, the p95
    of a calendar of 5,000 nodes is 563 ms instead of 152 (`./test bench portal --nodes 5000 --current 20000
    --without cache`, 28 November 2026, AMD EPYC, 2 cores).

    Attributes:
        seconds: How long an answer is shown; None: until the broker's next poll of Slurm.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._answers = LastAnswers()
        #: What the broker reported last of running jobs, and the same with their nodes' names.
        self._expanded: tuple[list[RunningJob], RunningJobs] = [], RunningJobs()
        self._reserved: tuple[list[Reservation], Reservations] = [], Reservations()
        self._asking: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def cluster(self) -> Cluster:
        """Partitions and nodes. Raises CarmeError, as the broker does; so do the others."""
        return self._cached("cluster", lambda: broker(self._answers).cluster())

    def forecast(self) -> Forecast:
        """How many GPUs will be free."""
        return self._cached("forecast", lambda: broker(self._answers).forecast())

    def running(self) -> RunningJobs:
        """The jobs that run, with their nodes' names; requested less often, as there may be thousands."""
        return self._cached("running", self._running_jobs, least=JOBS_SECONDS)

    def _running_jobs(self) -> RunningJobs:
        """Only one thread at a time asks for them."""
        jobs = broker(self._answers).running()
        before, expanded = self._expanded
        if jobs is not before:
            known = {job.node_list: names for job, names in expanded}
            names = (known.get(job.node_list) or expand(job.node_list) for job in jobs)
            expanded = RunningJobs(zip(jobs, names, strict=True))
            self._expanded = jobs, expanded
        return expanded

    def reservations(self) -> Reservations:
        """Slurm's."""
        return self._cached("reservations", self._known_reservations)

    def _known_reservations(self) -> Reservations:
        """Only one thread at a time asks for them."""
        found = broker(self._answers).reservations()
        if found is not self._reserved[0]:
            self._reserved = found, Reservations(found)
        return self._reserved[1]

    def access(self, user: str, *, anew: bool = False) -> Access:
        """What Slurm lets somebody use; with `anew` as the broker says from now on, whatever is cached."""
        name, ask = f"access-{user}", lambda: broker().access(user=user)
        return self._cached(name, ask, seconds=ACCESS_SECONDS, anew=anew)

    def _cached(
        self,
        name: str,
        ask: Callable[[], T],
        least: float = 0.0,
        seconds: float | None = None,
        anew: bool = False,
    ) -> T:
        key, pages = f"broker-{name}", caches["pages"]
        come = time.monotonic() if anew else None
        known: _Known[T] | None = None if anew else pages.get(key)
        # One thread asks, however long the broker takes; the others show its earlier answer. Who has nothing
        # to show waits for that one's answer.
        if known is None or not pages.get(f"{key}-new"):
            lock = self._asking[name]
            if lock.acquire(blocking=known is None):
                again: _Known[T] | None = pages.get(key)
                if again is not None and come is not None and again.begun < come:
                    again = None  # while this thread waited, no request came
                if again is not None and (anew or pages.get(f"{key}-new")):
                    known = again
                    lock.release()
                elif again is not None and self.seconds is None:
                    # No page waits for long while there is an answer of a moment ago.
                    words = (lock, key, ask, least, seconds)
                    asking = threading.Thread(target=self._ask, args=words, daemon=True)
                    try:
                        asking.start()
                    except RuntimeError:
                        lock.release()  # there can be no more threads now; a later page asks
                    else:
                        if not again.is_slow:
                            asking.join(WAIT_SECONDS)
                    known = pages.get(key) or again
                else:
                    known = self._ask(lock, key, ask, least, seconds)
        assert known is not None
        if known.failure is not None:
            raise known.failure.error()
        return cast(T, known.value)

    def _ask(
        self, lock: threading.Lock, key: str, ask: Callable[[], T], least: float, seconds: float | None
    ) -> "_Known[T]":
        """Ask the broker, and cache what it says. The lock of that question is held, and released here.

        Args:
            least: Seconds for which the answer is shown at least.
            seconds: Those for which it is shown; None: it depends on how long it took.
        """
        try:
            begun = time.monotonic()
            known = _answer(ask)
            took = time.monotonic() - begun
            shown = self.seconds if seconds is None else seconds
            if shown is None:
                shown = max(settings.SITE.slurm.poll_seconds, least)
                if known.failure is None:
                    shown = shown_seconds(shown, took)
            known = replace(known, is_slow=took >= SLOW_SECONDS, begun=begun)
            pages = caches["pages"]
            _renew(pages.get(key), known)
            pages.set(key, known, 2 * shown + BROKER_TIMEOUT)
            pages.set(f"{key}-new", True, shown)
            return known
        finally:
            lock.release()


def shown_seconds(least: float, took: float) -> float:
    """For how many seconds an answer of the broker is shown that took so many to come."""
    return max(least, min(REST_SECONDS, REST_TIMES * took))


@dataclass(frozen=True)
class _Known(Generic[T]):
    """An answer of the broker's: a value or a failure, whether that took long, and when it was requested."""

    value: T | None
    failure: Failure | None
    is_slow: bool = False
    begun: float = 0.0


def _answer(ask: Callable[[], T]) -> _Known[T]:
    try:
        return _Known(ask(), None)
    except CarmeError as error:
        return _Known(None, Failure.of(error))


def _renew(before: _Known[Any] | None, known: _Known[Any]) -> None:
    """Derive of a new answer what pages used of the one before, so that none of them has to."""
    if before is None or before.value is None or known.value is None or known.value is before.value:
        return
    try:
        derived.renew(before.value, known.value)
    except Exception:
        logger.exception("What pages derive of an answer of the broker could not be made ahead")


cluster_cache = ClusterCache()
"""The cache of this process."""


#: After so many seconds the broker is queried again for what somebody may use. The first page after them may
#: still show the earlier answer, up to 30 s old; bookings do not rely on it. The broker queries Slurm
#: once a minute.
ACCESS_SECONDS = 10.0


def access_of(user: str, *, anew: bool = False) -> Access:
    """What Slurm lets somebody use, as it was a moment ago; empty while nobody answers.

    Args:
        anew: Only what the broker says from now on, whatever is cached.
    """
    try:
        return cluster_cache.access(user, anew=anew)
    except CarmeError:
        return Access(user=user)


def entry_points(image: Image) -> dict[str, str]:
    """What an image can open, with titles; an image that names nothing has JupyterLab."""
    return image.entry_points or {"lab": "JupyterLab"}


def images() -> ImageCatalogue:
    """The images of this site."""
    return ImageCatalogue(settings.SITE.images.directory)


def supplies(cluster: Cluster) -> list[Supply]:
    """The GPUs of the cluster by type. Those of nodes that take no jobs are not free."""
    return derived.get(cluster, "supplies", _supplies)


def _supplies(cluster: Cluster) -> list[Supply]:
    free: Counter[str] = Counter()
    total: Counter[str] = Counter()
    per_node: Counter[str] = Counter()
    # Once through the nodes: there may be thousands.
    for node in cluster.nodes:
        available, used = node.available, node.gpus_used
        for kind, count in node.gpus.items():
            total[kind] += count
            if count > per_node[kind]:
                per_node[kind] = count
            if available:
                free[kind] += max(0, count - used.get(kind, 0))
    return [Supply(kind, free[kind], total[kind], per_node[kind]) for kind in sorted(total)]


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
    nodes = cluster.members(partition.name)
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
    usable_partitions = [
        candidate
        for candidate in usable(cluster, access).partitions
        if candidate.state == "UP" and candidate.node_names
    ]
    payers: list[str | None] = [account, *([] if request.account else access.accounts)]
    for payer in payers:
        for partition in [first, *usable_partitions]:
            if partition_refusal(partition, access, payer, request.qos) is None:
                if partition == first and payer == account:
                    return request
                return request.model_copy(update={"partition": partition.name, "account": payer})
    return request  # the broker says why not
