"""`carme-backup create|check|restore|key`, as root on the head."""

import argparse
from pathlib import Path

from carme import __version__
from carme.backup.archive import MAKES_OWNERS, Manifest, check, create, restore
from carme.backup.sealing import make_key
from carme.backup.services import require_stopped
from carme.command_line import add_config, run_command
from carme.config import DEFAULT_PATH
from carme.wording import number

__all__ = ["main"]

UNITS = ("carme-broker", "carme-hub", "carme-portal", "carme-sync", "carme-worker", "carme-beat")
#: All of a head, as `systemctl stop 'carme-*.service'` stopped them; timers go on.
STARTED = (
    *("carme-broker", "carme-proxy", "carme-hub", "carme-portal", "carme-sync", "carme-worker"),
    *("carme-beat", "carme-cluster-exporter"),
)
#: Lets nginx serve the certificate that was restored.
CERTIFICATE = "carme-certificate"

_EPILOG = """\
examples:
  carme-backup key /root/carme-backup.key
  carme-backup create --key /root/carme-backup.key /backup/carme-monday
  carme-backup check --key /root/carme-backup.key /backup/carme-monday
  systemctl stop 'carme-*.service' && carme-backup restore --key /root/carme-backup.key /backup/carme-monday
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0: done, 1: refused or failed, 2: wrong usage."""
    options = command_parser().parse_args(arguments)
    return run_command("carme-backup", lambda: options.run(options))


def command_parser() -> argparse.ArgumentParser:
    """The command line of `carme-backup`."""
    parser = argparse.ArgumentParser(
        prog="carme-backup",
        description="Back up what the head of a site holds, encrypted, while the site runs; and put it back.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"carme-backup {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    make = commands.add_parser("key", help="make a key; keep a copy of it elsewhere")
    make.add_argument("file", metavar="FILE", type=Path)
    make.set_defaults(run=_key)
    new = commands.add_parser("create", help="make a backup")
    add_config(new, DEFAULT_PATH)
    new.add_argument("--also", type=Path, action="append", default=[], metavar="PATH", help="another one")
    new.add_argument("--images", action="store_true", help="the images, too, not their manifests alone")
    new.set_defaults(run=_create)
    check = commands.add_parser("check", help="read a backup as a whole, and say what it holds")
    check.add_argument("--list", action="store_true", help="name each file in it")
    check.set_defaults(run=_check)
    restore = commands.add_parser("restore", help="put back what a backup holds")
    restore.add_argument("--into", type=Path, metavar="FOLDER", help="write it below a folder, to look at it")
    restore.set_defaults(run=_restore)
    for each in (new, check, restore):
        each.add_argument("--key", type=Path, required=True, metavar="FILE", help="the file with the key")
        each.add_argument("file", metavar="FILE", type=Path, help="the backup")
    return parser


def _key(options: argparse.Namespace) -> int:
    make_key(options.file)
    print(f"The key is {options.file}. Keep a copy elsewhere: without it no backup can be opened.")
    return 0


def _create(options: argparse.Namespace) -> int:
    config: Path = options.config
    count = create(options.file, options.key, config, options.also, options.images)
    print(f"{options.file} holds {number(count, 'file')}. See that it can be read: carme-backup check")
    return 0


def _check(options: argparse.Namespace) -> int:
    about, paths, missing = check(options.file, options.key)
    if options.list:
        print("\n".join(paths))
    print(f"{_about(about)} It is whole, with {number(len(paths), 'file')}.")
    if missing:
        print(f"This host lacks owners of files: {', '.join(missing)}. {MAKES_OWNERS}")
    return 0


def _restore(options: argparse.Namespace) -> int:
    if options.into is None:
        require_stopped(UNITS)
    about, count = restore(options.file, options.key, options.into)
    if options.into is not None:
        print(f"{number(count, 'file')} written below {options.into}.")
        return 0
    if about.version == __version__:
        units = " ".join((*STARTED, CERTIFICATE))
        print(f"{number(count, 'file')} restored. Start the site with: systemctl start {units}")
        print(
            f"On a new head, where nothing is enabled yet: systemctl start {CERTIFICATE}, then run site.yml, "
            "without carme_awaits_restore."
        )
    else:
        print(f"{number(count, 'file')} restored. {_about(about)} This host has {__version__}.")
        print(
            f"Use: systemctl start {CERTIFICATE}, then run site.yml, without carme_awaits_restore. It brings "
            "the databases up to date and starts the services; do not start them before."
        )
    print("Sessions that were started after the backup was made end: the hub does not know them.")
    return 0


def _about(about: Manifest) -> str:
    return f"Backup of {about.host}, made by Carme {about.version} at {about.time}."
