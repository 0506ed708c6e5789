"""`carme session`: what users do with their sessions, on the cluster or through the portal."""

import argparse
import os
import sys
import webbrowser
from datetime import UTC, datetime
from urllib.parse import quote

from carme.broker import BrokerClient
from carme.cli import portal_sessions, shell
from carme.cli.output import length, listed, moment, plain, print_json, print_table, printed
from carme.cli.portal import is_remote
from carme.command_line import add_json
from carme.config import load
from carme.errors import InvalidRequest
from carme.images import ImageCatalogue, app_path, is_own
from carme.jobs import minutes_text, parse_minutes
from carme.sessions import STEPS, QueueEstimate, Session, SessionState
from carme.translation import message as _
from carme.translation import translated
from carme.wording import listing, number

# Further modules that add commands of `carme session`, each by its `add`.
PARTS = (portal_sessions, shell)


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "session", aliases=["sessions"], help="start, list, open, extend and stop your sessions"
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    every = actions.add_parser("list", help="list your sessions")
    every.add_argument("--all", action="store_true", help="include sessions that ended in the last days")
    every.set_defaults(run=_list)

    show = actions.add_parser("show", help="show one session: its state, its remaining time, its timeline")
    show.set_defaults(run=_show)

    opening = actions.add_parser(
        "open", help="print a session's address, and open it where there is a display"
    )
    opening.add_argument("--app", help="what to open in it (default: lab)", default="lab")
    opening.set_defaults(run=_open)

    extend = actions.add_parser("extend", help="give a session more time")
    extend.set_defaults(run=_extend)

    stop = actions.add_parser("stop", help="end a session")
    stop.set_defaults(run=_stop)

    for action in (show, opening, extend, stop):
        action.add_argument("name", metavar="NAME", help="the session (see: carme session list)")
    extend.add_argument("minutes", metavar="MINUTES", help="how much longer: 30 (minutes), 45m, 2h")
    for action in (every, show, opening, extend, stop):
        add_json(action)
    for part in PARTS:
        part.add(actions)


def _list(options: argparse.Namespace) -> int:
    if is_remote():
        return portal_sessions.every(options)
    none = "You have had no sessions in the last days." if options.all else "You have no sessions now."
    return listed(
        options,
        BrokerClient().sessions(active=not options.all),
        ["SESSION", "STATE", "IMAGE", "NODES", "JOB", "REMAINING", "EXPLANATION"],
        lambda session: [
            session.name,
            session.label,
            session.image or "-",
            session.node_list or "-",
            session.job_id,
            length(session.ends - datetime.now(UTC)) if session.ends else "-",
            translated(session.sentence).partition("\n")[0],
        ],
        f"{none}\nStart one at {load().site.url}/",
    )


def _show(options: argparse.Namespace) -> int:
    if is_remote():
        return portal_sessions.show(options)
    session = BrokerClient().session(options.name)
    if options.json:
        print_json(session)
        return 0
    print(f"Session {session.name} (job {session.job_id}): {session.label}")
    for line in translated(session.sentence).splitlines():
        print(plain(line))
    print()
    now = datetime.now(UTC)
    facts = [("image", session.image), ("partition", session.partition), ("nodes", session.node_list)]
    if session.estimate:
        facts.append(("expected", estimate_text(session.estimate)))
    if session.ends:
        facts.append(("ends", f"{moment(session.ends)}, in {length(session.ends - now)}"))
    if session.idle_since:
        facts.append(("idle", f"for {length(now - session.idle_since)}"))
    if session.stops_idle:
        facts.append(
            (
                "warning",
                f"it is idle and will be stopped in {length(session.stops_idle - now)}; use it to keep it",
            )
        )
    for title, text in facts:
        if text:
            print(f"{title + ':':<11}{plain(text)}")
    if session.marks:
        print()
        _print_timeline(session)
    return 0


def _print_timeline(session: Session) -> None:
    rows, before = [], None
    for mark in session.marks:
        passed = f"+{(mark.at - before).total_seconds():.2f} s" if before else ""
        rows.append([STEPS[mark.step], mark.at.astimezone().strftime("%H:%M:%S.%f")[:-4], passed.rjust(11)])
        before = mark.at
    day = session.marks[0].at.astimezone()
    print_table(["TIMELINE", day.strftime("%Y-%m-%d"), "AFTER".rjust(11)], rows)
    first, last = session.marks[0], session.marks[-1]
    passed = (last.at - first.at).total_seconds()
    print(f"\n{STEPS[first.step]} to {STEPS[last.step].lower()}: {passed:.2f} s")


def estimate_text(estimate: QueueEstimate) -> str:
    """When a waiting session may start, in words."""
    words = [f"place {estimate.place} of {estimate.waiting}"]
    if estimate.earliest and estimate.latest:
        first, last = (when.astimezone() for when in (estimate.earliest, estimate.latest))
        whole = first.date() != datetime.now().astimezone().date() or last.date() != first.date()
        form = "%Y-%m-%d %H:%M" if whole else "%H:%M"
        words.append(f"expected to start between {first.strftime(form)} and {last.strftime(form)}")
        if estimate.judged:
            judged = number(estimate.judged, "such estimate")
            words.append(
                f"{estimate.correct} of the last {judged} {'was' if estimate.correct == 1 else 'were'} right"
            )
    else:
        words.append("Slurm has no plan for its start yet")
    return "; ".join(words)


def _open(options: argparse.Namespace) -> int:
    find = portal_sessions.address if is_remote() else _address
    url = find(options.name, options.app)
    opened = _has_display() and webbrowser.open(url)
    return printed(options, {"url": url, "opened": opened}, url)


def _address(name: str, app: str) -> str:
    """Where an app of a session is. Raises InvalidRequest."""
    session = BrokerClient().session(name)
    settings = load()
    # What a user's own image can open, the portal alone knows.
    own = is_own(session.image)
    apps = {}
    if session.image and not own:
        apps = ImageCatalogue(settings.images.directory).get(session.image).entry_points
    if app not in apps and not own:
        raise InvalidRequest(
            _(
                "The image {image} of the session {name} has no app {app!r}; it has: {apps}.",
                image=session.image,
                name=session.name,
                app=app,
                apps=listing(apps),
            ),
            _("Name one of these with --app."),
            field="app",
        )
    if session.state is not SessionState.READY:
        raise InvalidRequest(
            _(
                "The session {name} is not ready: {label}.",
                name=session.name,
                label=session.label.lower(),
            ),
            _("Check its state with: carme session show {name}", name=session.name),
            field="name",
        )
    # As JupyterHub quotes names; notebooks and nginx know them by no other.
    return (
        f"{settings.site.url}{settings.hub.base_path}user/{quote(session.owner, safe='@~')}/"
        f"{quote(session.name, safe='')}/{app_path(app)}"
    )


def _has_display() -> bool:
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _extend(options: argparse.Namespace) -> int:
    if is_remote():
        return portal_sessions.extend(options)
    minutes = parse_minutes(options.minutes)
    client = BrokerClient()
    extension = client.extend(client.session(options.name).job_id, minutes)
    limit = minutes_text(extension.minutes_limit)
    line = f"The session {options.name} now ends at {moment(extension.ends)}, {limit} after its start."
    return printed(options, extension, line)


def _stop(options: argparse.Namespace) -> int:
    if is_remote():
        return portal_sessions.stop(options)
    client = BrokerClient()
    session = client.session(options.name)
    client.cancel(session.job_id, session=session.name)
    if session.is_over:
        line = f"The session {session.name} is over already: {session.label.lower()}."
    else:
        line = f"The session {session.name} is being stopped. Files that you saved stay."
    return printed(options, {"stopped": session.name, "job_id": session.job_id}, line)
