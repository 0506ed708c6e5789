"""The end of a job's log."""

from dataclasses import dataclass

from carme.broker import BrokerClient
from carme.errors import CarmeError
from carme_webui.help_links import explained
from carme_webui.jobs.models import Job

__all__ = ["Tail", "tail"]

BYTES = 16 * 1024


@dataclass(frozen=True)
class Tail:
    """The last lines of a log, or why there are none; `cut`: more lies before, more follows at `offset`."""

    text: str = ""
    cut: bool = False
    offset: int = 0
    failure: str = ""


def tail(job: Job, broker: BrokerClient) -> Tail:
    """The last lines of the job's log, read as its owner."""
    try:
        size = broker.log(job.id, user=job.user, limit=1).size
        offset = max(0, size - BYTES)
        part = broker.log(job.id, user=job.user, offset=offset, limit=BYTES)
        text = part.text
    except CarmeError as error:
        return Tail(failure=explained(error))
    if offset:
        text = text.partition("\n")[2] or text
    return Tail(text=text, cut=offset > 0, offset=part.offset)
