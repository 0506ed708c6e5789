"""`carme admin`: what administrators do, through the portal, with a token that allows it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import date
from typing import TYPE_CHECKING

from carme.cli.output import listed, moment, print_table, printed
from carme.cli.portal import client, read_time
from carme.command_line import add_json, add_start
from carme.errors import InvalidRequest
from carme.translation import message as _

if TYPE_CHECKING:
    from carme.api import BookingOut, ChangeOut, MaintenanceOut, OthersJob, UserOut

__all__ = ["add"]

MOST_SHOWN = 120  # letters of what changed


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    admin = commands.add_parser(
        "admin", help="manage users, nodes, jobs, maintenance and announcements; for administrators"
    )
    actions = admin.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, help: str, run: object, *places: str) -> argparse.ArgumentParser:
        """One command, which takes these arguments."""
        action = actions.add_parser(name, help=help)
        for place in places:
            action.add_argument(place, metavar=place.upper())
        action.set_defaults(run=run)
        add_json(action)
        return action

    _add_people(command)
    _add_nodes_and_jobs(command)
    _add_record(command)
    _add_announcements(command)


#: Makes a command of its name, its help, what it runs, and its arguments.
Command = Callable[..., argparse.ArgumentParser]


def _add_people(command: Command) -> None:
    users = command("users", "list users", _users)
    users.add_argument("search", metavar="WORDS", nargs="?", default="", help="part of a name or address")
    enrol = command("enrol", "add a user: portal, Slurm, home, quotas", _enrol, "user")
    enrol.add_argument("--email", default="")
    enrol.add_argument("--project", default="", metavar="PROJECT", help="project that the user joins")
    command("disable", "keep a user from signing in", _disable, "user")
    command("enable", "let a user sign in again", _enable, "user")
    command("remove-second-factor", "remove the second factor of a user who has lost it", _factor, "user")
    command("message", "send a user a message", _message, "user", "message")


def _add_nodes_and_jobs(command: Command) -> None:
    command("nodes", "list nodes with states and reasons", _nodes)
    drain = command("drain", "let no more jobs start on a node", _drain, "node")
    drain.add_argument("--reason", required=True)
    command("resume", "let jobs start on a node again", _resume, "node")
    jobs = command("jobs", "list all waiting and running jobs and sessions", _jobs)
    jobs.add_argument("search", metavar="WORDS", nargs="?", default="", help="user, account, number, name")
    stop = command("stop", "end a user's job, and notify its owner of the reason", _stop)
    stop.add_argument("job", metavar="JOB", type=int)
    stop.add_argument("--message", default="", help="the reason, for the owner")
    command("approvals", "list bookings that wait for approval", _approvals)
    for each in (
        command("approve", "approve a booking", _approve, "booking"),
        command("refuse", "refuse a booking", _refuse, "booking"),
    ):
        each.add_argument("--reason", default="", help="the reason, for its owner")


def _add_record(command: Command) -> None:
    record = command("record", "search the audit log: who, when, what, before, after", _record)
    record.add_argument("search", metavar="WORDS", nargs="?", default="")
    record.add_argument("--who", default="", metavar="USER")
    record.add_argument("--kind", default="", help="kind of object: user, booking, project, ...")
    record.add_argument("--since", metavar="DAY", help="like 2026-11-22 (UTC)")
    record.add_argument("--until", metavar="DAY")
    record.add_argument("--limit", type=int, default=50, metavar="N")
    command("policies", "list the site's limits and policies", _policies)


def _add_announcements(command: Command) -> None:
    command("maintenance", "list planned maintenance", _maintenance)
    plan = command("plan", "plan maintenance", _plan)
    plan.add_argument("--title", required=True)
    plan.add_argument("--text", default="", help="what users should know")
    add_start(plan)
    plan.add_argument("--end", required=True, metavar="TIME")
    plan.add_argument("--nodes", default="", help="separated by commas (default: all)")
    command("cancel-maintenance", "cancel maintenance, or end it now", _cancel_maintenance, "name")
    command("call-off", "the earlier name of 'cancel-maintenance'", _call_off, "name")
    command("news", "list announcements", _news)
    publish = command("publish", "publish an announcement", _publish)
    publish.add_argument("--title", required=True)
    publish.add_argument("--text", default="")
    publish.add_argument("--until", metavar="DAY", help="the last day on the dashboard")
    publish.add_argument(
        "--number", type=int, metavar="N", help="number of the announcement that this replaces"
    )
    unpublish = command("unpublish", "delete an announcement", _unpublish)
    unpublish.add_argument("number", type=int, metavar="N")


def _day(text: str | None) -> date | None:
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        raise InvalidRequest(
            _("{text!r} is not a day.", text=text), _("Write it like 2026-11-30."), field="day"
        ) from None


def _users(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.users(options.search, limit=None)

    def row(user: UserOut) -> list[object]:
        role, active = "admin" if user.admin else "user", "yes" if user.active else "no"
        return [user.name, user.email, active, role, ",".join(user.projects), moment(user.last_login)]

    titles = ["USER", "E-MAIL", "SIGNS IN", "ROLE", "PROJECTS", "LAST LOGIN"]
    return listed(options, found, titles, row)


def _enrol(options: argparse.Namespace) -> int:
    with client() as portal:
        onboarded = portal.admin.onboard(options.user, email=options.email, project=options.project)
    lines = onboarded.done or ["Nothing was to be done."]
    password = (
        [f"First password of {onboarded.user.name}: {onboarded.password}"] if onboarded.password else []
    )
    return printed(options, onboarded, *lines, *password)


def _disable(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.set_active(options.user, False)
    return printed(options, found, f"{options.user} cannot sign in any more.")


def _enable(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.set_active(options.user, True)
    return printed(options, found, f"{options.user} can sign in again.")


def _factor(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.admin.remove_second_factor(options.user)
    return printed(options, {"user": options.user}, f"{options.user} has no second factor now.")


def _message(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.admin.message(options.user, options.message)
    return printed(options, {"notified": options.user}, f"Message sent to {options.user}.")


def _nodes(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.nodes()
    return listed(
        options,
        found,
        ["NODE", "STATE", "REASON"],
        lambda each: [each.name, each.state, each.reason or "-"],
    )


def _drain(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.admin.drain(options.node, options.reason)
    return printed(options, {"drained": options.node}, f"No more jobs start on {options.node}.")


def _resume(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.admin.resume(options.node)
    return printed(options, {"resumed": options.node}, f"Jobs start on {options.node} again.")


def _jobs(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.jobs(options.search, limit=None)

    def row(job: OthersJob) -> list[object]:
        known = [job.id, job.user, job.kind, job.state, job.nodes, job.gpus]
        return [*known, moment(job.started), job.name]

    titles = ["JOB", "USER", "KIND", "STATE", "NODES", "GPUS", "BEGAN", "NAME"]
    return listed(options, found, titles, row)


def _stop(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.stop(options.job, options.message)
    return printed(options, found, f"Job {found.id} of {found.user} is ended; its owner gets a message.")


def _approvals(options: argparse.Namespace) -> int:
    with client() as portal:
        found = [approval.known for approval in portal.admin.approvals(limit=None)]

    def row(booking: BookingOut) -> list[object]:
        times = moment(booking.start), moment(booking.end)
        return [booking.name, booking.owner, booking.project or "-", *times, booking.gpu_hours, booking.title]

    titles = ["BOOKING", "OWNER", "PROJECT", "BEGINS", "ENDS", "GPU-HOURS", "TITLE"]
    return listed(options, found, titles, row)


def _approve(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.decide(options.booking, True, options.reason)
    return printed(options, found, f"Booking {found.name}: {found.label}.")


def _refuse(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.decide(options.booking, False, options.reason)
    return printed(options, found, f"Booking {found.name}: {found.label}.")


def _record(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.record(
            options.search,
            who=options.who,
            kind=options.kind,
            since=_day(options.since),
            until=_day(options.until),
            limit=options.limit,
        )

    def row(change: ChangeOut) -> list[object]:
        changes = (f"{field}: {before} -> {after}" for field, (before, after) in change.changes.items())
        what = f"{change.action} {change.kind}", change.what
        return [moment(change.when), change.who or "the portal", *what, "; ".join(changes)[:MOST_SHOWN]]

    return listed(options, found, ["WHEN", "WHO", "WHAT", "OF", "BEFORE AND AFTER"], row)


def _policies(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.policies()
    if options.json:
        return printed(options, found)
    rows = [[part.title, key, value] for part in found for key, value in part.values.items()]
    print_table(["PART", "KEY", "VALUE"], rows)
    return 0


def _maintenance(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.maintenance()

    def row(maintenance: MaintenanceOut) -> list[object]:
        times = moment(maintenance.start), moment(maintenance.end)
        return [
            maintenance.name,
            *times,
            ",".join(maintenance.node_names),
            maintenance.title,
            maintenance.problem or "-",
        ]

    return listed(options, found, ["MAINTENANCE", "BEGINS", "ENDS", "NODES", "TITLE", "PROBLEM"], row)


def _plan(options: argparse.Namespace) -> int:
    with client() as portal:
        maintenance = portal.admin.plan_maintenance(
            options.title,
            start=read_time(options.start),
            end=read_time(options.end),
            nodes=options.nodes.replace(",", " ").split(),
            text=options.text,
        )
    return printed(
        options,
        maintenance,
        f"Planned: {maintenance.name}, {moment(maintenance.start)} to {moment(maintenance.end)}.",
    )


def _cancel_maintenance(options: argparse.Namespace) -> int:
    return _cancelled(options, {"cancelled": options.name})


def _call_off(options: argparse.Namespace) -> int:
    print(
        "carme admin: 'call-off' is 'cancel-maintenance' now, and 'called_off' of its JSON is 'cancelled'. "
        "Use the new names.",
        file=sys.stderr,
    )
    return _cancelled(options, {"cancelled": options.name, "called_off": options.name})


def _cancelled(options: argparse.Namespace, value: dict[str, str]) -> int:
    with client() as portal:
        portal.admin.cancel_maintenance(options.name)
    return printed(options, value, "Its nodes take jobs again.")


def _news(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.admin.news()
    return listed(
        options,
        found,
        ["NUMBER", "SINCE", "UNTIL", "TITLE"],
        lambda each: [each.number, moment(each.created), each.until or "-", each.title],
    )


def _publish(options: argparse.Namespace) -> int:
    with client() as portal:
        announcement = portal.admin.publish(
            options.title, options.text, until=_day(options.until), number=options.number
        )
    return printed(options, announcement, f"Published as number {announcement.number}.")


def _unpublish(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.admin.delete_news(options.number)
    return printed(options, {"deleted": options.number}, "It is withdrawn.")
