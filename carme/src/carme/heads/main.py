"""`carme-head status|promote|demote`, as root on a head of a site that has two; the rest is for units."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from carme import __version__
from carme.command_line import add_config, add_json, run_command
from carme.config import DEFAULT_PATH, Settings, load
from carme.errors import CarmeError
from carme.heads import active_head, address, promotion, state
from carme.heads.lease import Lease
from carme.heads.names import own_name, require_two_heads
from carme.wording import listing, number

__all__ = ["main"]

_EPILOG = """\
examples:
  carme-head status
  carme-head promote            # on the standby, when the active head has failed
  carme-head demote             # on the active head, before its maintenance; then promote the other one
"""
#: Seconds after which a copy of the state is old.
OLD = 120


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0: done, 1: refused or failed, 2: wrong usage, 3: another head is active."""
    options = command_parser().parse_args(arguments)
    return run_command("carme-head", lambda: options.run(options))


def command_parser() -> argparse.ArgumentParser:
    """The command line of `carme-head`."""
    parser = argparse.ArgumentParser(
        prog="carme-head",
        description="Which of a site's two heads is active, and how to change that.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"carme-head {__version__}")
    add_config(parser, DEFAULT_PATH)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    status = commands.add_parser("status", help="show which head is active, and the state of this one")
    add_json(status)
    status.set_defaults(run=_status)
    up = commands.add_parser("promote", help="make this head the active one")
    up.add_argument("--force", action="store_true", help="even if the other head still renews its lease")
    up.add_argument("--first", action="store_true", help="only if no head was ever active")
    up.set_defaults(run=_promote)
    down = commands.add_parser("demote", help="stop this head's services, so that the other can be promoted")
    down.set_defaults(run=_demote)
    for name, run, text in (
        ("hold", _hold, "for carme-active.service: hold the lease"),
        ("drop-address", _drop_address, "for carme-active.service: give the address up"),
        ("pull", _pull, "for carme-head-pull.service: copy the active head's state"),
        ("send-state", _send, "for the other head's ssh: write this head's state"),
    ):
        commands.add_parser(name, help=text).set_defaults(run=run)
    return parser


def _lease(options: argparse.Namespace) -> tuple[Settings, Lease, str]:
    settings = load(options.config)
    require_two_heads(settings)
    me = own_name(settings)
    folder = settings.portal.state_directory
    if not folder.is_dir():
        raise CarmeError(f"{folder} does not exist.", "Run site.yml for this host.")
    address = settings.database("portal")
    return settings, Lease(address, folder.owner(), me, settings.heads.lease_seconds), me


def _folder(settings: Settings) -> Path:
    return settings.broker.state_directory.parent / "head"


@contextlib.contextmanager
def _alone(settings: Settings, wait: bool) -> Iterator[bool]:
    """Whether no other command changes this head's state meanwhile."""
    folder = _folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                yield False
                return
            print("Waiting for the copy that runs.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield True


def _status(options: argparse.Namespace) -> int:
    settings, lease, me = _lease(options)
    holder = lease.read()
    copied = state.last_copy(_folder(settings))
    units = promotion.states()
    if options.json:
        shown = {
            "me": me,
            "heads": settings.heads.names,
            "active": holder.name if holder else None,
            "epoch": holder.epoch if holder else 0,
            "renewed_seconds_ago": holder.age if holder else None,
            "lease_seconds": lease.seconds,
            "alive": holder is not None and holder.is_alive,
            "copied_from": copied.source if copied else None,
            "copied_seconds_ago": state.age(copied) if copied else None,
            "units": units,
        }
        print(json.dumps(shown, indent=2))
        return 0
    if holder is None:
        print("No head was promoted yet.")
    elif holder.is_alive:
        print(f"{holder.name} is the active head (epoch {holder.epoch}, seen {holder.age:.0f} s ago).")
    else:
        print(f"{holder.name} was the active head (epoch {holder.epoch}); its lease has run out.")
    print(f"This is {me}. Running here: {_describe_units(units)}.")
    if holder is None or holder.name != me:
        print(_describe_copy(copied))
    return 0


def _describe_units(units: Mapping[str, str]) -> str:
    running = [unit for unit, condition in units.items() if condition == "active"]
    return listing(running) if running else "nothing"


def _describe_copy(copied: state.StateCopy | None) -> str:
    if copied is None:
        return "The active head's state was never copied to this one."
    text = f"The state of {copied.source} was copied {state.age(copied):.0f} s ago."
    return text + (" See journalctl --unit carme-head-pull." if state.age(copied) > OLD else "")


def _promote(options: argparse.Namespace) -> int:
    settings, lease, me = _lease(options)
    with _alone(settings, wait=True):
        holder = lease.read()
        if options.first and holder is not None:
            print(f"{holder.name} is the active head already.")
            return 0
        copied = state.last_copy(_folder(settings))
        if holder is not None and holder.name != me:
            if copied is None and not options.force:
                raise CarmeError(
                    "The active head's state was never copied to this one: its secrets are not here.",
                    "Run carme-head pull, or use --force after a restore by carme-backup.",
                )
            print(_describe_copy(copied))
        start = time.monotonic()
        promotion.promote(lease, me, options.force, lambda text: print(text, flush=True))
        print(f"{me} is the active head after {time.monotonic() - start:.0f} s.")
    if settings.heads.address:
        print(f"It has the address {settings.heads.address}.")
    else:
        print(f"Let the name of {settings.site.url} and the hub's address {settings.hub.listen} lead here.")
    return 0


def _demote(options: argparse.Namespace) -> int:
    settings, lease, me = _lease(options)
    with _alone(settings, wait=True):
        promotion.demote(lease, me, print)
    print("Promote the other head now: carme-head promote")
    return 0


def _hold(options: argparse.Namespace) -> int:
    settings, lease, me = _lease(options)
    return active_head.hold(settings, lease, me)


def _drop_address(options: argparse.Namespace) -> int:
    settings = load(options.config)
    if settings.heads.address:
        address.drop(settings.heads.address, settings.heads.interface)
    return 0


def _pull(options: argparse.Namespace) -> int:
    settings, lease, me = _lease(options)
    with _alone(settings, wait=False) as free:
        if not free:
            print("Another command works on this head's state.")
            return 0
        holder = lease.read()
        if holder is None or holder.name == me:
            return 0
        count = state.pull(settings, options.config, holder.name)
        state.note_copy(_folder(settings), state.StateCopy(holder.name, holder.epoch, time.time()))
    print(f"{number(count, 'file')} of {holder.name} copied.")
    return 0


def _send(options: argparse.Namespace) -> int:
    settings = load(options.config)
    require_two_heads(settings)
    state.send(settings, options.config, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
