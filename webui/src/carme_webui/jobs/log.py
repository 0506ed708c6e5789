"""The end of a job's log."""

from dataclasses import dataclass

from carme.broker import BrokerClient
from carme.errors import CarmeError
from carme_webui.jobs.models import Job

__all__ = ["Tail", "tail"]

BYTES = 16 * 1024


@dataclass(frozen=True)
class Tail:
    """The last lines of a log, or the sentence on why there are none; `cut`: there is more before."""

    text: str = ""
    cut: bool = False
    failure: str = ""


def tail(job: Job, broker: BrokerClient) -> Tail:
    """The last lines of the job's log, read as its owner."""
    try:
        size = broker.log(job.id, user=job.user, limit=1).size
        offset = max(0, size - BYTES)
        text = broker.log(job.id, user=job.user, offset=offset, limit=BYTES).text
    except CarmeError as error:
        return Tail(failure=str(error))
    if offset:
        text = text.partition("\n")[2] or text
    return Tail(text=text, cut=offset > 0)
