"""What `carme session` does through the portal: `start`, and all else where only the portal is in reach."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from carme.cli import predictions
from carme.cli.output import listed, moment, print_json, printed
from carme.cli.portal import client
from carme.command_line import (
    add_account,
    add_data,
    add_image,
    add_json,
    add_qos,
    add_reservation,
    add_share,
    add_size,
    add_time,
    add_title,
)
from carme.errors import InvalidRequest
from carme.jobs import parse_minutes
from carme.translation import message as _
from carme.wording import listing

if TYPE_CHECKING:
    from carme.api import SessionOut

__all__ = ["add", "address", "every", "extend", "show", "stop"]


def add(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `carme session start`."""
    start = actions.add_parser("start", help="start a session")
    add_image(start, "image to run in", required=True)
    add_size(start)
    add_time(start, required=True)
    add_share(start)
    add_title(start)
    add_reservation(start)
    add_account(start, "account that pays (default: yours); see 'carme accounts'")
    add_qos(start)
    add_data(start, "the session")
    predictions.add(start)
    start.add_argument("--wait", action="store_true", help="wait until it is ready")
    start.set_defaults(run=_start)
    add_json(start)


def _start(options: argparse.Namespace) -> int:
    if options.choices:
        return predictions.show(options)
    with client() as portal:
        session = portal.sessions.start(
            options.image,
            minutes=parse_minutes(options.time),
            gpus=options.gpus,
            nodes=options.nodes,
            gpu_type=options.gpu_type,
            cpus=options.cpus,
            memory_mb=options.memory,
            partition=options.partition,
            reservation=options.reservation,
            title=options.title,
            account=options.account,
            qos=options.qos,
            stage=options.stage,
            results=options.results,
            prediction=predictions.read_prediction(options),
        )
        known = session.wait() if options.wait else session.info()
    apps = [f"{app.title}: {app.url}" for app in known.apps]
    return printed(options, known, f"Session {known.name}: {known.label}.", *apps)


def every(options: argparse.Namespace) -> int:
    """List them."""
    with client() as portal:
        found = [each.info() for each in portal.sessions.list(active=None if options.all else True)]

    def row(session: SessionOut) -> list[object]:
        return [
            session.name,
            session.label,
            session.title,
            session.job_id or "-",
            moment(session.ends),
            session.explanation,
        ]

    titles = ["SESSION", "STATE", "TITLE", "JOB", "ENDS", "EXPLANATION"]
    none = "You have no sessions now. Start one with: carme session start"
    return listed(options, found, titles, row, none)


def show(options: argparse.Namespace) -> int:
    """Show one."""
    with client() as portal:
        found = portal.sessions.get(options.name).info()
    if options.json:
        print_json(found)
        return 0
    print(f"Session {found.name} (job {found.job_id or '-'}): {found.label}")
    print(found.explanation)
    facts = [
        ("image", found.options.image),
        ("nodes", found.node_list),
        ("ends", found.ends and moment(found.ends)),
    ]
    facts += [(app.title, app.url) for app in found.apps]
    for title, text in facts:
        if text:
            print(f"{title + ':':<11}{text}")
    return 0


def address(name: str, app: str) -> str:
    """Where an app of a session is. Raises InvalidRequest."""
    with client() as portal:
        found = portal.sessions.get(name).info()
    urls = {known.name: known.url for known in found.apps}
    if not urls:
        raise InvalidRequest(
            _("The session {name} is not ready: {label}.", name=name, label=found.label.lower()),
            _("Check its state with: carme session show {name}", name=name),
            field="name",
        )
    if app not in urls:
        raise InvalidRequest(
            _(
                "The image {image} of the session {name} has no app {app!r}; it has: {urls}.",
                image=found.options.image,
                name=name,
                app=app,
                urls=listing(urls),
            ),
            _("Name one of these with --app."),
            field="app",
        )
    return urls[app]


def extend(options: argparse.Namespace) -> int:
    """Give one more time."""
    with client() as portal:
        given = portal.sessions.get(options.name).extend(parse_minutes(options.minutes))
    return printed(options, given, f"The session {options.name} now ends at {moment(given.ends)}.")


def stop(options: argparse.Namespace) -> int:
    """End one."""
    with client() as portal:
        portal.sessions.get(options.name).stop()
    words = f"The session {options.name} is being stopped. Files that you saved stay."
    return printed(options, {"stopped": options.name}, words)
