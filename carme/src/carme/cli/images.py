"""`carme images`: what can be used, and images of your own, through the portal."""

from __future__ import annotations

import argparse
from pathlib import Path

from carme.api import ImageDetails
from carme.cli.output import print_json, print_table, printed
from carme.cli.portal import client
from carme.command_line import Options, add_json, add_title
from carme.errors import NotFound

FAILED = 1

_EPILOG = """\
examples:
  carme images build mine --requirements requirements.txt --base torch --wait
  carme images build mine --definition mine.def
  carme images share mine --project vision --folder /scratch/vision
  carme submit --image mine@$USER -- python train.py
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    images = commands.add_parser("images", help="list images, build and delete your own, through the portal")
    actions = images.add_subparsers(title="commands", metavar="COMMAND", required=True)
    every = actions.add_parser("list", help="list the images for sessions and jobs, and your builds")
    every.set_defaults(run=_list)
    build = actions.add_parser(
        "build",
        help="build an image in a batch job",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.add_argument("name", metavar="NAME")
    what = build.add_mutually_exclusive_group(required=True)
    what.add_argument("--requirements", metavar="FILE", help="packages for pip, one in each line")
    what.add_argument("--definition", metavar="FILE", help="an Apptainer definition file")
    build.add_argument("--base", default="", help="the site's image that packages are added to")
    add_title(build)
    build.add_argument("--folder", default="", help="folder for its file (default: your home)")
    _add_project(build)
    build.add_argument("--wait", action="store_true", help="show the log, and wait until it is built")
    build.set_defaults(run=_build)
    show = actions.add_parser("show", help="show an image with its packages")
    show.add_argument("name", metavar="NAME")
    show.set_defaults(run=_show)
    share = actions.add_parser(
        "share", help="share an image with the members of a project, or stop sharing it"
    )
    share.add_argument("name", metavar="NAME")
    members = share.add_mutually_exclusive_group(required=True)
    _add_project(members)
    members.add_argument("--nobody", action="store_true", help="stop sharing it")
    share.add_argument("--folder", default="", help="folder for its file (default: where it is)")
    share.set_defaults(run=_share)
    delete = actions.add_parser("delete", help="delete one of your images and its file")
    delete.add_argument("name", metavar="NAME")
    delete.set_defaults(run=_delete)
    for each in (every, build, show, share, delete):
        add_json(each)


def _list(options: argparse.Namespace) -> int:
    with client() as portal:
        usable = portal.images()
        own = [each.info() for each in portal.images.list()]
    if options.json:
        print_json({"usable": usable, "own": own})
        return 0
    rows = [[each.name, "ready", each.title, each.digest[:19]] for each in usable]
    rows += [[each.reference, each.state, each.title, ""] for each in own if each.state != "ready"]
    print_table(["IMAGE", "STATE", "TITLE", "DIGEST"], rows)
    return 0


def _add_project(parser: Options) -> None:
    parser.add_argument("--project", default="", metavar="PROJECT", help="project whose members may use it")


def _build(options: argparse.Namespace) -> int:
    with client() as portal:
        image = portal.images.build(
            options.name,
            requirements=Path(options.requirements) if options.requirements else None,
            definition=options.definition,
            base=options.base,
            title=options.title,
            folder=options.folder,
            project=options.project,
        )
        known = image.info()
        if options.wait:
            if image.job is not None and not options.json:
                for text in image.job.logs(follow=True):
                    print(text, end="", flush=True)
            known = image.wait()
    if options.json:
        print_json(known)
    elif known.state == "building":
        print(f"Job {known.job_id} builds the image {known.reference}.")
        print(f"Follow it with: carme logs -f {known.job_id}")
    elif known.state == "ready":
        print(f"The image {known.reference} is ready: {known.digest}")
    else:
        print(f"The image {known.reference} was not built: {known.problem}")
    return FAILED if known.state == "failed" else 0


def _show(options: argparse.Namespace) -> int:
    with client() as portal:
        try:
            known = portal.images.get(options.name).info()
        except NotFound:
            return _show_details(portal.images.details(options.name), options.json)
    if options.json:
        print_json(known)
        return 0
    print(f"{known.reference}: {known.state}. {known.problem}".strip())
    print_table(
        ["FIELD", "VALUE"],
        [
            *[["title", known.title], ["file", known.file], ["digest", known.digest]],
            *[["shared with", known.project or "nobody"], ["opens", ", ".join(known.entry_points.values())]],
        ],
    )
    if known.packages:
        print_table(["PACKAGE", "VERSION"], list(map(list, known.packages.items())))
    return 0


def _show_details(known: ImageDetails, as_json: bool) -> int:
    """Show one of the site's images."""
    if as_json:
        print_json(known)
        return 0
    print(f"{known.name}: {known.title}. {known.description}".strip())
    print_table(["FIELD", "VALUE"], [["digest", known.digest], ["opens", ", ".join(known.apps.values())]])
    print_table(["PACKAGE", "VERSION"], list(map(list, known.packages.items())))
    return 0


def _share(options: argparse.Namespace) -> int:
    with client() as portal:
        known = portal.images.get(options.name).share(options.project, folder=options.folder)
    users = f"The members of {known.project}" if known.project else "Nobody but you"
    return printed(options, known, f"{users} can use {known.reference} now.")


def _delete(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.images.get(options.name).delete()
    return printed(options, {"deleted": options.name}, f"The image {options.name} is deleted.")
