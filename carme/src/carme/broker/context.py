"""What the parts of the broker share."""

from dataclasses import dataclass

from carme.broker.access_cache import AccessCache
from carme.broker.audit import AuditLog
from carme.broker.concurrency import ConcurrencyLimit
from carme.broker.feed import Feed
from carme.broker.sessions import SessionBook
from carme.broker.watch import Watch
from carme.config import Settings
from carme.images import ImageCatalogue
from carme.slurm import Slurm


@dataclass(frozen=True)
class Context:
    """What the parts of the broker share.

    Attributes:
        settings: The site's.
        slurm: The cluster.
        feed: Wakes peers that wait for changes.
        book: The sessions, and what is on record about jobs.
        watch: The snapshot of the queue.
        accesses: What users may use.
        images: The site's images.
        audit: The audit log.
        programs: Limits programs that run as users.
        cancels: Limits cancellations, which need no home: those that hang must not keep their places.
        accounting: Limits questions to the accounting.
        python: The interpreter of the small programs that run as users.
    """

    settings: Settings
    slurm: Slurm
    feed: Feed
    book: SessionBook
    watch: Watch
    accesses: AccessCache
    images: ImageCatalogue
    audit: AuditLog
    programs: ConcurrencyLimit
    cancels: ConcurrencyLimit
    accounting: ConcurrencyLimit
    python: str
