"""When a session or a batch job would begin if it were started now, and with what it would begin earlier."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.translation import gettext as _

from carme.broker import BrokerClient
from carme.jobs import JobRequest, SessionOptions, arrays
from carme.translation import translated
from carme.wording import number
from carme_webui.clocks import minutes_words
from carme_webui.sessions.models import query_of
from carme_webui.start_times import AT_ONCE, expected_start

__all__ = ["StartEstimate", "gpu_hours", "start_estimates"]

# One that is earlier by less is not worth a change.
WORTH = timedelta(minutes=5)


@dataclass(frozen=True)
class StartEstimate:
    """An answer of Slurm's.

    Attributes:
        options: What was requested.
        start: When it would begin at the latest by Slurm's plan; None where Slurm gives no time.
        earliest: When it would begin if jobs ended as early as they lately did.
        words: What is less than was requested: `1 node`; empty for what was requested itself.
        refusal: Why it would never begin.
    """

    options: SessionOptions | JobRequest
    start: datetime | None
    earliest: datetime | None = None
    words: str = ""
    refusal: str = ""

    @property
    def at_once(self) -> bool:
        """It would begin now."""
        return self.start is not None and self.start <= timezone.now() + AT_ONCE

    @property
    def first(self) -> datetime | None:
        """The beginning of the range in which it would begin; None where that is not a range."""
        if self.earliest is None or self.start is None or self.start - self.earliest < WORTH:
            return None
        return self.earliest

    @property
    def query(self) -> str:
        """The query of the address that fills the start form in with it; empty for a batch job."""
        return query_of(self.options) if isinstance(self.options, SessionOptions) else ""


def start_estimates(
    options: SessionOptions | JobRequest, user: str, broker: BrokerClient
) -> list[StartEstimate]:
    """What Slurm says to a request, and to smaller ones that would begin earlier.

    Raises:
        CarmeError: Nothing can be queried.
    """
    requested = _ask(options, user, broker)
    if requested.start is None or requested.at_once:
        return [requested]
    smaller = [_ask(smaller_options, user, broker, words) for smaller_options, words in _smaller(options)]
    sooner = [(each.start, each) for each in smaller if each.start and each.start <= requested.start - WORTH]
    return [requested, *(choice for _start, choice in sorted(sooner, key=lambda pair: pair[0]))]


def gpu_hours(options: SessionOptions | JobRequest) -> float:
    """What a session or a job costs that uses up its time, an array with all its tasks."""
    tasks = arrays.count(options.array) if isinstance(options, JobRequest) and options.array else 1
    return tasks * options.nodes * options.gpus_per_node * options.minutes / 60


def _smaller(
    options: SessionOptions | JobRequest,
) -> Iterator[tuple[SessionOptions | JobRequest, str]]:
    """Half as much of one thing each."""
    if options.nodes > 1:
        nodes = options.nodes // 2
        yield options.model_copy(update={"nodes": nodes}), translated(number(nodes, "node"))
    if options.gpus_per_node > 1:
        gpus = options.gpus_per_node // 2
        words = translated(number(gpus, "GPU"))
        words = _("%s on each node") % words if options.nodes > 1 else words
        yield options.model_copy(update={"gpus_per_node": gpus}), words
    if options.minutes >= 2 * 10:
        minutes = options.minutes // 2
        yield options.model_copy(update={"minutes": minutes}), minutes_words(minutes)


def _ask(
    options: SessionOptions | JobRequest, user: str, broker: BrokerClient, words: str = ""
) -> StartEstimate:
    request = (
        options
        if isinstance(options, JobRequest)
        else options.request(name="estimate", command=["true"], environment={})
    )
    start, earliest, refusal = expected_start(request, user, broker)
    return StartEstimate(options, start, earliest, words, refusal)
