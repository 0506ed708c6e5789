"""What users of a site do: book nodes for now, and see how their jobs ended. The head is `portal`."""

from __future__ import annotations

from typing import Any

from portal_bookings import booked, confirm, send

from carme.validation import Visitor
from patience import HANG

from .site_hosts import SiteHosts, wait_until


def reservation(site: SiteHosts, name: str) -> str:
    """What Slurm says of a reservation, in one line; nothing where there is none."""
    shown = ("scontrol", "--oneliner", "show", "reservation", name)
    return site.run("portal", *shown, check=False).stdout


def book_for_now(site: SiteHosts, owner: Visitor) -> str:
    """The name of a booking that has begun."""

    def answer() -> Any:
        day, clock = site.run("portal", "date", "--utc", "+%Y-%m-%d %H:%M").stdout.split()
        answer = send(owner, date=day, time=clock)
        return None if "cannot begin in the past" in answer.text else answer

    name = booked(wait_until("a form was sent within a minute", answer, HANG))
    wait_until("it has begun", lambda: "State=ACTIVE" in reservation(site, name), HANG)
    return name


def delete_booking(site: SiteHosts, owner: Visitor, name: str) -> None:
    """Give a booking's nodes back."""
    confirm(owner, f"bookings/{name}/delete/")
    wait_until(
        "the node is given back", lambda: f"ReservationName={name} " not in reservation(site, name), HANG
    )


def ended(site: SiteHosts, job: str) -> str:
    """The state in which a job ended, its account and its partition."""
    query = (
        "--allocations",
        "--noheader",
        "--parsable2",
        f"--jobs={job}",
        "--format=State,Account,Partition",
    )

    def line() -> str:
        shown = site.run("portal", "sacct", *query).stdout.strip()
        state, *rest = shown.split("|")
        # The accounting may learn of the end before it has all of the beginning.
        return shown if state not in ("PENDING", "RUNNING") and all(rest) and state else ""

    return wait_until(f"job {job} has ended", line, HANG)
