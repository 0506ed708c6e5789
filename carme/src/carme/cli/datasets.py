"""`carme datasets`."""

import argparse
import os
from pathlib import Path
from typing import Any

from carme.broker import BrokerClient
from carme.cli.output import moment, print_json, print_table, printed
from carme.command_line import add_json
from carme.config import load
from carme.datasets import OWN, Dataset, Datasets, copies, readers, unpack
from carme.errors import CarmeError, InvalidRequest
from carme.translation import message as _
from carme.wording import size


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands."""
    parser = commands.add_parser("datasets", help="list, add and describe datasets that jobs read")
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = parts.add_parser("list", help="all datasets")
    add_json(command)
    command.set_defaults(run=_list)

    command = parts.add_parser("show", help="one dataset with its versions and where copies of them are")
    command.add_argument("name", metavar="NAME")
    add_json(command)
    command.set_defaults(run=_show)

    command = parts.add_parser(
        "add",
        help="add a folder or an archive as a dataset, or as its newest version",
        description="Read all files of FOLDER and add it with its digest. The data stays where it is, and "
        "must not be changed as long as the version is used: jobs that have a copy do not look for changes. "
        "An archive (tar, also with gzip, bzip2 or xz, or zip), uploaded for example, is unpacked first.",
    )
    command.add_argument("name", metavar="NAME")
    command.add_argument("folder", metavar="FOLDER", help="the folder, or an archive of it")
    command.add_argument(
        "--into", default="", metavar="FOLDER", help="where an archive is unpacked (default: beside it)"
    )
    command.add_argument("--title", default="", help="a short description")
    command.add_argument("--licence", default="", help="terms under which it may be used")
    _add_site_option(command)
    add_json(command)
    command.set_defaults(run=_add)

    command = parts.add_parser("remove", help="take a dataset out of the catalogue; its data stays")
    command.add_argument("name", metavar="NAME")
    _add_site_option(command)
    add_json(command)
    command.set_defaults(run=_remove)


def datasets() -> Datasets:
    """The site's datasets and this user's own."""
    return Datasets(load().staging.datasets, Path.home() / OWN)


def _add_site_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--site", action="store_true", help="in the site's catalogue (administrators)")


def _list(options: argparse.Namespace) -> int:
    found = datasets().all()
    if options.json:
        print_json([_fields(dataset) for dataset in found])
        return 0
    if not found:
        print("There are no datasets yet. Add one with: carme datasets add NAME FOLDER")
        return 0
    rows = []
    for each in found:
        newest = each.version()
        what = [each.name, newest.short, newest.files, size(newest.size), readers(newest.path)]
        rows.append([*what, "site" if each.site else "yours", each.licence or "-", each.title or "-"])
    print_table(["NAME", "VERSION", "FILES", "SIZE", "READERS", "WHOSE", "LICENCE", "TITLE"], rows)
    return 0


def _show(options: argparse.Namespace) -> int:
    dataset = datasets().get(options.name)
    reported = _fields(dataset, _copies(dataset))
    if options.json:
        print_json(reported)
        return 0
    print(f"{dataset.name}{': ' + dataset.title if dataset.title else ''}")
    print(f"Licence: {dataset.licence or 'unknown'}. Catalogue: {'the site' if dataset.site else 'yours'}.")
    rows = []
    for version, each in zip(dataset.versions, reported["versions"], strict=True):
        what = [version.short, moment(version.added), version.files, size(version.size), version.path]
        rows.append([*what, each["readers"], ", ".join(each["copies"]) or "-"])
    print_table(["VERSION", "ADDED", "FILES", "SIZE", "PATH", "READERS", "YOUR COPIES ON"], rows)
    print(f"Use it with: carme submit --stage {dataset.name} ...")
    return 0


def _copies(dataset: Dataset) -> dict[str, list[str]]:
    """The nodes that hold copies of this user's, by digest; nothing while the broker is down."""
    try:
        nodes = BrokerClient().cluster().nodes
    except CarmeError:
        return {}
    return copies(dataset, nodes, os.getuid())


def _fields(dataset: Dataset, copies: dict[str, list[str]] | None = None) -> dict[str, Any]:
    values = dataset.model_dump(mode="json")
    for version, each in zip(dataset.versions, values["versions"], strict=True):
        each |= {"short": version.short, "readers": readers(version.path)}
        if copies is not None:
            each["copies"] = copies.get(version.digest, [])
    return values


def _add(options: argparse.Namespace) -> int:
    folder = options.folder
    if Path(folder).is_file():
        folder = unpack(folder, options.into)
        if not options.json:
            print(f"Unpacked into {folder}.", flush=True)
    elif options.into:
        raise InvalidRequest(
            _("{folder} is not an archive, so there is nothing to unpack.", folder=folder),
            _("Leave out --into."),
            field="into",
        )
    dataset, new = datasets().add(
        options.name, folder, site=options.site, title=options.title, licence=options.licence
    )
    newest = dataset.version()
    what = f"{newest.files} files, {size(newest.size)}"
    known = "" if new else " It was there already."
    return printed(
        options,
        _fields(dataset),
        f"The dataset {dataset.name} has version {newest.short} ({what}).{known}",
        f"Use it with: carme submit --stage {dataset.name} ...",
    )


def _remove(options: argparse.Namespace) -> int:
    datasets().remove(options.name, site=options.site)
    line = f"The dataset {options.name} is out of the catalogue; its data stays where it is."
    return printed(options, {"removed": options.name}, line)
