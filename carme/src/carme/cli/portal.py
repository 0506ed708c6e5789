"""`carme login`, `carme bookings`: through the portal, from any computer."""

from __future__ import annotations

import argparse
import getpass
import importlib
import os
import sys
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from carme.cli.output import listed, moment, printed
from carme.command_line import add_data, add_image, add_json, add_size, add_start, add_time, add_title
from carme.config import DEFAULT_PATH
from carme.errors import CarmeError, ConfigError, InvalidRequest
from carme.jobs import parse_minutes
from carme.translation import message as _

if TYPE_CHECKING:
    from carme.api import BookingOut, JobOut
    from carme.client import Client

__all__ = ["add", "cancel_job", "client", "is_remote", "read_time"]


def is_remote() -> bool:
    """Whether this computer is not one of the cluster's, so that only the portal can be reached."""
    return not (os.environ.get("CARME_CONFIG") or DEFAULT_PATH.exists())


def library() -> ModuleType:
    """`carme.client`. Raises ConfigError when this computer lacks what it needs."""
    try:
        return importlib.import_module("carme.client")
    except ImportError as error:
        raise ConfigError(
            _("The Python client is not installed here: {error_name} is missing.", error_name=error.name),
            _("Install it with: pip install 'carme[client]'"),
        ) from None


def client() -> Client:
    """The portal. Raises ConfigError when this computer has no token, or lacks what the client needs."""
    return library().Client()


def cancel_job(job_id: int, task: int | None = None) -> JobOut:
    """End a job of mine, an array, or a task of one; what it was before."""
    with client() as portal:
        job = portal.jobs.get(job_id, task)
        known = job.info()
        job.cancel()
    return known


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    login = commands.add_parser(
        "login", help="connect this computer to a portal, with one of your API tokens"
    )
    login.add_argument("url", metavar="URL", help="the portal's address")
    login.add_argument(
        "--ca",
        metavar="FILE",
        help="trust this certificate (PEM) too: of your site's own authority, or of the portal",
    )
    login.set_defaults(run=_login)

    bookings = commands.add_parser("bookings", help="book nodes with GPUs for later, through the portal")
    parts = bookings.add_subparsers(title="commands", metavar="COMMAND", required=True)
    booked = parts.add_parser("list", help="list your bookings")
    booked.add_argument("--all", action="store_true", help="include past bookings")
    booked.set_defaults(run=_bookings)
    kinds = parts.add_parser("kinds", help="list which nodes can be booked")
    kinds.set_defaults(run=_kinds)
    create = parts.add_parser("create", help="book nodes")
    free = parts.add_parser("free", help="list the nearest times at which nodes are free")
    for each in (create, free):
        add_size(each, required=True)
        add_time(each, required=True)
        add_start(each)
    add_title(create)
    create.add_argument("--project", default="", metavar="NAME", help="the project that it is for")
    create.add_argument("--users", default="", help="other users who may use it, separated by commas")
    create.set_defaults(run=_book)
    _plan(create)
    free.set_defaults(run=_free)
    session = parts.add_parser("session", help="start a session automatically when a booking begins")
    session.add_argument("name", metavar="NAME")
    _plan(session)
    session.set_defaults(run=_booked_session)
    offer = parts.add_parser("offer", help="offer a booking to another user, who has to accept it")
    offer.add_argument("name", metavar="NAME")
    offer.add_argument(
        "user", metavar="USER", nargs="?", help="the user to offer it to; without one, withdraw the offer"
    )
    offer.set_defaults(run=_offer)
    accept = parts.add_parser("accept", help="take over a booking that was offered to you")
    accept.add_argument("name", metavar="NAME")
    accept.add_argument("--decline", action="store_true", help="decline a booking that was offered to you")
    accept.set_defaults(run=_accept)
    delete = parts.add_parser("delete", help="delete a booking")
    delete.add_argument("name", metavar="NAME")
    delete.set_defaults(run=_delete)
    for command in (booked, kinds, create, free, session, offer, accept, delete):
        add_json(command)


def _plan(parser: argparse.ArgumentParser) -> None:
    add_image(parser, "start a session in this image automatically in the first minute")
    add_data(parser, "the booking")


def _login(options: argparse.Namespace) -> int:
    known = library()
    # Never from an argument: others see those.
    token = getpass.getpass("Token: ") if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not token:
        raise InvalidRequest(
            _("There is no token."),
            _("Make one at {url}/tokens/ and give it here.", url=options.url.rstrip("/")),
            field="token",
        )
    login = known.Login()
    authority = _certificate(options.ca) if options.ca else login.authority(options.url)
    verify = known.trusting(authority) if authority else True
    with known.Client(options.url, token, verify=verify) as portal:
        account = portal.profile()
    login.write(options.url.rstrip("/"), token, authority)
    print(f"You are {account.user} at {options.url}; the token holds until {moment(account.token_expires)}.")
    print(f"It is kept in {login.path}.")
    return 0


def _certificate(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError as error:
        raise InvalidRequest(
            _("{path} cannot be read: {why}.", path=path, why=error.strerror), _("Name a file with it.")
        ) from None
    except UnicodeDecodeError:
        raise InvalidRequest(
            _("{path} is not text, so it is not a certificate as PEM.", path=path),
            _("Convert it with: openssl x509 -inform DER -in {path} -out NEW", path=path),
        ) from None


def _bookings(options: argparse.Namespace) -> int:
    with client() as portal:
        known = [each.known for each in portal.bookings.list()]

    def row(booking: BookingOut) -> list[object]:
        times, nodes = (moment(booking.start), moment(booking.end)), ",".join(booking.node_names)
        return [
            booking.name,
            booking.label,
            *times,
            nodes,
            f"{booking.gpus_per_node} x {booking.gpu_type}",
            booking.title,
        ]

    found = [each for each in known if options.all or each.state != "ended"]
    titles = ["BOOKING", "STATE", "BEGINS", "ENDS", "NODES", "GPUS", "TITLE"]
    return listed(options, found, titles, row, "You have no bookings. Make one with: carme bookings create")


def _kinds(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.bookings.kinds()
    return listed(
        options,
        found,
        ["PARTITION", "GPU TYPE", "GPUS PER NODE", "NODES"],
        lambda each: [each.partition, each.gpu_type, each.gpus, each.nodes],
        "No nodes can be booked here.",
    )


def read_time(text: str) -> datetime:
    """A time of this computer's zone. Raises InvalidRequest."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            _("{text!r} is not a time.", text=text), _("Write it like 2026-11-30T09:00."), field="start"
        ) from None


def _time_and_gpus(options: argparse.Namespace) -> dict[str, Any]:
    """What a booking is for, and a look for free times too."""
    return {
        "start": read_time(options.start),
        "minutes": parse_minutes(options.time),
        "gpu_type": options.gpu_type,
        "gpus": options.gpus,
        "partition": options.partition,
        "nodes": options.nodes,
    }


def _book(options: argparse.Namespace) -> int:
    with client() as portal:
        booking = portal.bookings.create(
            **_time_and_gpus(options),
            title=options.title,
            users=options.users.replace(",", " ").split(),
            project=options.project,
        )
        known = booking.known
        if options.image:
            try:
                known = booking.start_session(options.image, stage=options.stage, results=options.results)
            except CarmeError:
                booking.delete()  # half of what was requested is not it
                raise
    return _show_booking(options, known)


def _show_booking(options: argparse.Namespace, known: BookingOut) -> int:
    lines = [f"Booking {known.name}: {known.label}, {moment(known.start)} to {moment(known.end)}."]
    if known.session_image:
        data = f", with {', '.join(each.name for each in known.stage)} near it" if known.stage else ""
        lines.append(f"A session in {known.session_image} starts automatically in its first minute{data}.")
    if known.offered_to:
        lines.append(f"{known.offered_to} may take it over.")
    return printed(options, known, *lines)


def _booked_session(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.bookings.get(options.name)
        known = found.start_session(options.image, stage=options.stage, results=options.results)
    return _show_booking(options, known)


def _offer(options: argparse.Namespace) -> int:
    with client() as portal:
        known = portal.bookings.get(options.name).offer(options.user)
    return _show_booking(options, known)


def _accept(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.bookings.get(options.name)
        known = found.decline() if options.decline else found.accept()
    return _show_booking(options, known)


def _free(options: argparse.Namespace) -> int:
    with client() as portal:
        slots = portal.bookings.free_slots(**_time_and_gpus(options))
    return listed(options, slots, ["BEGINS", "ENDS"], lambda slot: [moment(slot.start), moment(slot.end)])


def _delete(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.bookings.get(options.name).delete()
    words = f"The booking {options.name} is deleted; its nodes are free for others."
    return printed(options, {"deleted": options.name}, words)
