"""Who has which node when, from what Slurm says. Pure functions."""

from collections.abc import Iterable

from carme.bookings.slots import Claim
from carme.jobs import Job, Reservation
from carme.jobs.nodes import expand

__all__ = ["of_jobs", "of_reservations"]


def of_jobs(jobs: Iterable[Job], reservations: Iterable[Reservation] = ()) -> list[Claim]:
    """What running jobs have until their time limits: Slurm reserves no node on which a job may still run.

    Args:
        reservations: Jobs within one of them end with it.
    """
    ends = {reservation.name: reservation.end for reservation in reservations}
    claims = []
    for job in jobs:
        if not job.is_running or job.started is None:
            continue
        end = job.ends
        until = ends.get(job.reservation)
        if until is not None:
            end = min(end, until) if end is not None else until
        claims += [Claim(node, job.started, end) for node in expand(job.node_list)]
    return claims


def of_reservations(reservations: Iterable[Reservation]) -> list[Claim]:
    """What reservations keep, such as the administrators' maintenance."""
    return [
        Claim(node, reservation.start, reservation.end)
        for reservation in reservations
        for node in reservation.node_names
    ]
