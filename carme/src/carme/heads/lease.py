"""The lease of the active head: one row of the portal's PostgreSQL database.

A head is active while it holds the lease and renews it. All times are the database's, so the clocks of the
heads do not matter. Another head gets the lease when it has run out, or when an administrator takes it by
force; the number of the epoch then rises. A holder that finds another's name in the row, or that could not
renew for four fifths of the lease's length, stops its services: before anybody else may have started theirs.

The scheme is that of C. Gray and D. Cheriton, "Leases: an efficient fault-tolerant mechanism for distributed
file cache consistency", SOSP 1989.
"""

from __future__ import annotations

from dataclasses import dataclass

from carme.backup.databases import run_client
from carme.errors import CarmeError

__all__ = ["Holder", "Lease"]

#: Seconds after which a server that does not answer counts as away.
ANSWER_SECONDS = 8.0

_TABLE = """
SET client_min_messages = warning;
CREATE TABLE IF NOT EXISTS carme_head (
    id integer PRIMARY KEY CHECK (id = 1), holder text NOT NULL, epoch bigint NOT NULL,
    renewed timestamptz NOT NULL, seconds double precision NOT NULL);
"""
_READ = """
SELECT holder, epoch, extract(epoch FROM clock_timestamp() - renewed), seconds FROM carme_head;
"""
# A lease that was released stays so, also when its holder's host starts again.
_RENEW = """
UPDATE carme_head SET renewed = clock_timestamp(), seconds = :seconds
WHERE holder = :'me' AND renewed > to_timestamp(0)
RETURNING holder, epoch, 0, seconds;
"""
_TAKE = """
INSERT INTO carme_head VALUES (1, :'me', 1, clock_timestamp(), :seconds)
ON CONFLICT (id) DO UPDATE
SET holder = excluded.holder, epoch = carme_head.epoch + (carme_head.holder <> excluded.holder)::integer,
    renewed = clock_timestamp(), seconds = excluded.seconds
WHERE :force OR carme_head.holder = excluded.holder
   OR clock_timestamp() - carme_head.renewed > carme_head.seconds * interval '1 second'
RETURNING holder, epoch, 0, seconds;
"""
_RELEASE = """
UPDATE carme_head SET renewed = to_timestamp(0) WHERE holder = :'me' RETURNING holder, epoch, 1e9, seconds;
"""


@dataclass(frozen=True)
class Holder:
    """Who holds the lease.

    Attributes:
        name: The head's name in the inventory.
        epoch: How often the lease has changed hands, from 1.
        age: Seconds since it was renewed.
        seconds: How long it lasts after that.
    """

    name: str
    epoch: int
    age: float
    seconds: float

    @property
    def is_alive(self) -> bool:
        """Whether the lease has not run out."""
        return self.age <= self.seconds


class Lease:
    """The lease as one head sees it.

    Args:
        address: of the database, `postgresql://...`.
        account: as which PostgreSQL's client runs where we are root.
        me: this head's name.
        seconds: how long the lease lasts without being renewed.
    """

    def __init__(self, address: str, account: str, me: str, seconds: float) -> None:
        self._address = address
        self._account = account
        self._me = me
        self.seconds = seconds

    def read(self) -> Holder | None:
        """Who holds it, or None where nobody ever did. Raises CarmeError where the database is away."""
        return self._ask(_TABLE + _READ)

    def renew(self, within: float | None = None) -> Holder | None:
        """Extend it, if this head holds it and has not released it; else None.

        Args:
            within: Seconds that the attempt may take, if fewer than usual.
        """
        return self._ask(_RENEW, within)

    def acquire(self, force: bool = False) -> Holder | None:
        """Get it, if it is free, has run out or is ours; with `force` in any case. Else None."""
        return self._ask(_TABLE + _TAKE, None, force="true" if force else "false")

    def release(self) -> Holder | None:
        """Let it run out at once, if this head holds it."""
        return self._ask(_RELEASE)

    def _ask(self, script: str, within: float | None = None, **values: str) -> Holder | None:
        timeout = ANSWER_SECONDS if within is None else min(ANSWER_SECONDS, within)
        variables = {"me": self._me, "seconds": str(self.seconds), **values}
        words = ["psql", "--no-psqlrc", "--no-align", "--tuples-only", "--quiet", "--no-password"]
        words += ["--set=ON_ERROR_STOP=1", *(f"--set={name}={value}" for name, value in variables.items())]
        shown = run_client(words, self._address, self._account, text=script, timeout=timeout)
        rows = [line.split("|") for line in shown.splitlines() if line]
        if not rows:
            return None
        try:
            name, epoch, age, seconds = rows[-1]
            return Holder(name, int(epoch), max(0.0, float(age)), float(seconds))
        except ValueError:
            raise CarmeError(
                f"The table carme_head of the portal's database holds {shown.strip()[:200]!r}.",
                "Drop the table, and run carme-head promote on the head that is to be active.",
            ) from None
