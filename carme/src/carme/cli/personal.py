"""`carme files`, `presets`, `notices` and `projects`: through the portal, from any computer."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from carme.cli.output import listed, moment, plain, print_json, print_table, printed
from carme.cli.portal import client
from carme.command_line import add_image, add_json, add_share, add_size, add_time
from carme.errors import NotFound
from carme.jobs import parse_minutes
from carme.translation import message as _
from carme.wording import listing

if TYPE_CHECKING:
    from carme.api import InvitationOut, ProjectOut
    from carme.client import Client

__all__ = ["add"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    _add_files(commands)
    _add_presets(commands)
    _add_notices(commands)
    _add_projects(commands)


# --- files -----------------------------------------------------------------------------------------------


def _add_files(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    files = commands.add_parser("files", help="send and fetch files of the cluster through the portal")
    actions = files.add_subparsers(title="commands", metavar="COMMAND", required=True)
    every = actions.add_parser("list", help="list a folder")
    every.add_argument("path", metavar="PATH", nargs="?", help="default: your home")
    every.set_defaults(run=_files)
    upload = actions.add_parser(
        "upload", help="send a file; a second run continues where the first one stopped"
    )
    upload.add_argument("file", metavar="FILE", help="a file of this computer")
    upload.add_argument("path", metavar="PATH", help="where it goes; with a '/' at its end: the folder")
    upload.set_defaults(run=_upload)
    download = actions.add_parser(
        "download", help="fetch a file; a second run continues where the first one stopped"
    )
    download.add_argument("path", metavar="PATH", help="a file of the cluster")
    download.add_argument("file", metavar="FILE", nargs="?", help="where it goes (default: here)")
    download.set_defaults(run=_download)
    for each in (upload, download):
        each.add_argument("--replace", action="store_true", help="replace a file of that name")
    make = actions.add_parser("mkdir", help="make a folder")
    make.add_argument("path", metavar="PATH")
    make.set_defaults(run=_make)
    rename = actions.add_parser("rename", help="give a file or folder another name")
    rename.add_argument("path", metavar="PATH")
    rename.add_argument("name", metavar="NAME", help="the new name, without its folder")
    rename.set_defaults(run=_rename)
    delete = actions.add_parser("delete", help="delete a file, or a folder with all that is in it")
    delete.add_argument("path", metavar="PATH")
    delete.set_defaults(run=_delete)
    quota = actions.add_parser("quota", aliases=["room"], help="show your quota and the free space")
    quota.set_defaults(run=_quota)
    for command in (every, upload, download, make, rename, delete, quota):
        add_json(command)


def _files(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.files.list(options.path)
    if options.json:
        print_json(found)
        return 0
    print_table(
        ["NAME", "SIZE", "CHANGED"],
        [
            [entry.name + ("/" if entry.kind == "folder" else ""), entry.size, moment(entry.changed)]
            for entry in found.entries
        ],
    )
    if found.more:
        print("There is more in this folder than is shown.")
    return 0


def _progress(done: int, size: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done * 100 // max(size, 1)} % of {size} bytes", end="", file=sys.stderr)
        if done >= size:
            print(file=sys.stderr)


def _upload(options: argparse.Namespace) -> int:
    with client() as portal:
        path = portal.files.upload(options.file, options.path, replace=options.replace, progress=_progress)
    return printed(options, {"path": path}, f"Sent to {path}.")


def _download(options: argparse.Namespace) -> int:
    with client() as portal:
        file = portal.files.download(options.path, options.file, replace=options.replace, progress=_progress)
    return printed(options, {"file": str(file)}, f"Fetched to {file}.")


def _make(options: argparse.Namespace) -> int:
    with client() as portal:
        path = portal.files.make_folder(options.path)
    return printed(options, {"path": path}, f"Made {path}.")


def _rename(options: argparse.Namespace) -> int:
    with client() as portal:
        path = portal.files.rename(options.path, options.name)
    return printed(options, {"path": path}, f"It is {path} now.")


def _delete(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.files.delete(options.path)
    return printed(options, {"deleted": options.path}, f"Deleted {options.path}.")


def _quota(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.files.quotas()
    return listed(options, found, ["FOLDER", "QUOTA"], lambda each: [each.path, each.words])


# --- presets ---------------------------------------------------------------------------------------------


def _add_presets(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    presets = commands.add_parser("presets", help="save and list options of sessions that you start often")
    actions = presets.add_subparsers(title="commands", metavar="COMMAND", required=True)
    every = actions.add_parser("list", help="list your presets")
    every.set_defaults(run=_presets)
    save = actions.add_parser("save", help="save a preset; one of the same name is replaced")
    save.add_argument("name", metavar="NAME")
    add_image(save, "image of the session", required=True)
    add_size(save)
    add_time(save, required=True)
    add_share(save)
    save.set_defaults(run=_save)
    start = actions.add_parser("start", help="start a session from a preset")
    start.add_argument("name", metavar="NAME")
    start.set_defaults(run=_start)
    delete = actions.add_parser("delete", help="delete a preset")
    delete.add_argument("name", metavar="NAME")
    delete.set_defaults(run=_forget)
    for each in (every, save, start, delete):
        add_json(each)


def _presets(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.presets.list()
    return listed(
        options,
        found,
        ["PRESET", "IMAGE", "MINUTES", "LINK"],
        lambda each: [each.name, each.options.image, each.options.minutes, each.link],
        "You have no presets. Make one with: carme presets save",
    )


def _save(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.presets.save(
            options.name,
            image=options.image,
            minutes=parse_minutes(options.time),
            gpus_per_node=options.gpus,
            gpu_type=options.gpu_type,
            nodes=options.nodes,
            cpus_per_node=options.cpus,
            memory_mb_per_node=options.memory,
            partition=options.partition,
        )
    return printed(options, found, f"Saved as {found.name!r}: {found.link}")


def _start(options: argparse.Namespace) -> int:
    with client() as portal:
        known = portal.presets.start(options.name).info()
    return printed(options, known, f"Session {known.name}: {known.label}.")


def _forget(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.presets.delete(options.name)
    return printed(options, {"deleted": options.name}, f"The preset {options.name!r} is deleted.")


# --- notices ---------------------------------------------------------------------------------------------


def _add_notices(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    notices = commands.add_parser("notices", help="read your notifications, and choose which you get")
    actions = notices.add_subparsers(title="commands", metavar="COMMAND", required=True)
    every = actions.add_parser("list", help="list unread notifications")
    every.add_argument("--all", action="store_true", help="include those that you have read")
    every.set_defaults(run=_notices)
    read = actions.add_parser("read", help="mark all notifications as read")
    read.set_defaults(run=_read)
    kinds = actions.add_parser("kinds", help="list the kinds of notifications, and how you get them")
    kinds.set_defaults(run=_kinds)
    choose = actions.add_parser("choose", help="choose whether and how you get a kind of notifications")
    choose.add_argument("kind", metavar="KIND", help="see 'carme notices kinds'")
    for channel in ("page", "mail"):
        choose.add_argument(
            f"--{channel}", required=True, choices=["yes", "no"], help=f"whether you get them by {channel}"
        )
    choose.set_defaults(run=_choose)
    for each in (every, read, kinds, choose):
        add_json(each)


def _notices(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.notices.list(unread=None if options.all else True)
    return listed(
        options,
        found,
        ["WHEN", "WHAT"],
        lambda each: [moment(each.created), each.text],
        "Nothing waits to be read.",
    )


def _read(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.notices.read()
    return printed(options, {"read": True}, "All is marked as read.")


def _kinds(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.notices.kinds()
    return listed(
        options,
        found,
        ["KIND", "PAGE", "MAIL", "WHAT"],
        lambda each: [each.kind, _yes_or_no(each.page), _yes_or_no(each.mail), each.title],
    )


def _choose(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.notices.choose(options.kind, page=options.page == "yes", mail=options.mail == "yes")
    words = f"{found.title}: on pages {_yes_or_no(found.page)}, by mail {_yes_or_no(found.mail)}."
    return printed(options, found, words)


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


# --- projects --------------------------------------------------------------------------------------------


def _add_projects(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    projects = commands.add_parser(
        "projects", help="list and manage your projects, their members and invitations"
    )
    actions = projects.add_subparsers(title="commands", metavar="COMMAND", required=True)
    every = actions.add_parser("list", help="list your projects")
    every.set_defaults(run=_projects)
    show = actions.add_parser("show", help="show the members, limits and use of a project")
    invite = actions.add_parser("invite", help="invite a user to a project that you manage")
    withdraw = actions.add_parser("withdraw", help="withdraw an invitation")
    role = actions.add_parser("role", help="make a member a manager, or a manager a member")
    remove = actions.add_parser("remove", help="remove a member from a project")
    leave = actions.add_parser("leave", help="leave a project; your running jobs continue")
    accept = actions.add_parser("accept", help="join a project that invited you")
    decline = actions.add_parser("decline", help="decline an invitation")
    for each in (show, invite, withdraw, role, remove, leave, accept, decline):
        each.add_argument("name", metavar="PROJECT")
    for command in (invite, withdraw, role, remove):
        command.add_argument("user", metavar="USER")
    role.add_argument("role", choices=["manager", "member"])
    invitations = actions.add_parser("invitations", help="list your invitations")
    create = actions.add_parser("create", help="create a project; for administrators")
    create.add_argument("name", metavar="PROJECT")
    create.add_argument("--title", required=True)
    create.add_argument("--manager", required=True, metavar="USER", help="the user who manages it")
    limit = actions.add_parser("limit", help="change a project's limits; for administrators")
    limit.add_argument("name", metavar="PROJECT")
    limit.add_argument("--title")
    limit.add_argument("--partitions", help="separated by commas, or 'all'")
    for key, words in (("gpus", "GPUs"), ("nodes", "nodes"), ("jobs", "running jobs")):
        limit.add_argument(f"--{key}", metavar="N", help=f"{words} at a time; 'none': no limit")
    limit.add_argument("--gpu-hours", metavar="N", help="GPU hours in total; 'none': no limit")
    limit.add_argument("--time", help="longest job, like 90 (minutes) or 2h; 'none': no limit")
    close = actions.add_parser("close", help="close a project: it takes no more jobs; for administrators")
    reopen = actions.add_parser("reopen", help="reopen a closed project; for administrators")
    for command in (close, reopen):
        command.add_argument("name", metavar="PROJECT")
    runs = {show: _show, invite: _invite, withdraw: _withdraw, role: _role, remove: _remove, leave: _leave}
    runs |= {accept: _accept, decline: _decline, invitations: _invitations, create: _create, limit: _limit}
    runs |= {close: _close, reopen: _reopen}
    for command, run in runs.items():
        command.set_defaults(run=run)
    for command in (every, *runs):
        add_json(command)


def _projects(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.projects.list()

    def row(project: ProjectOut) -> list[object]:
        role = "manager" if project.manager else "member"
        return [project.name, role, len(project.members), project.gpu_hours_used, project.title]

    titles = ["PROJECT", "YOU", "MEMBERS", "GPU-HOURS", "TITLE"]
    return listed(options, found, titles, row, "You are in no project.")


def _show_project(options: argparse.Namespace, found: ProjectOut) -> int:
    if options.json:
        print_json(found)
        return 0
    state = f", closed since {moment(found.closed)}" if found.closed else ""
    print(f"{found.name}: {plain(found.title)} (account {found.account}{state})")
    if found.refused_partitions:
        print(
            f"These partitions do not take jobs of the account {found.account}: "
            f"{listing(found.refused_partitions)}. An administrator of Slurm can add it to their "
            "AllowAccounts."
        )
    print(f"Managers: {', '.join(found.managers)}. Members: {', '.join(found.members)}.")
    if found.invited:
        print(f"Invited: {', '.join(found.invited)}.")
    print(f"Partitions: {', '.join(found.partitions) or 'all'}.")
    rows = [
        ["GPUs now", found.gpus_now, _most(found.gpus)],
        ["nodes now", found.nodes_now, _most(found.nodes)],
        ["jobs now", found.jobs_now, _most(found.jobs)],
        ["GPU-hours", found.gpu_hours_used, _most(found.gpu_hours)],
        ["minutes of a job", "-", _most(found.minutes)],
        *([f"GPUs of type {kind}", "-", most] for kind, most in sorted(found.gpu_types.items())),
    ]
    print_table(["WHAT", "USED", "AT MOST"], rows)
    return 0


def _most(limit: int | None) -> str:
    return "-" if limit is None else str(limit)


def _show(options: argparse.Namespace) -> int:
    with client() as portal:
        return _show_project(options, portal.projects.get(options.name))


def _invite(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.projects.invite(options.name, options.user)
    return printed(options, found, f"{options.user} is invited.")


def _withdraw(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.projects.withdraw(options.name, options.user)
    return printed(options, found, f"{options.user} is not invited any more.")


def _role(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.projects.set_manager(options.name, options.user, options.role == "manager")
    return printed(options, found, f"{options.user} is a {options.role} now.")


def _remove(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.projects.remove(options.name, options.user)
    words = f"{options.user} is not in the project any more. Jobs that run go on until they end."
    return printed(options, {"removed": options.user}, words)


def _leave(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.projects.remove(options.name, portal.profile().user)
    return printed(options, {"left": options.name}, f"You are not in {options.name} any more.")


def _invitations(options: argparse.Namespace) -> int:
    with client() as portal:
        found = portal.projects.invitations()
    return listed(
        options,
        found,
        ["PROJECT", "BY", "SINCE", "TITLE"],
        lambda each: [each.project, each.by, moment(each.created), each.title],
        "Nobody asks you to join a project.",
    )


def _invitation(portal: Client, name: str) -> InvitationOut:
    for invitation in portal.projects.invitations():
        if invitation.project == name:
            return invitation
    raise NotFound(_("You have no invitation to {name!r}.", name=name), _("See: carme projects invitations"))


def _accept(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.projects.accept(_invitation(portal, options.name))
    return printed(options, {"joined": options.name}, f"You are in {options.name} now.")


def _decline(options: argparse.Namespace) -> int:
    with client() as portal:
        portal.projects.decline(_invitation(portal, options.name))
    return printed(options, {"declined": options.name}, f"You do not join {options.name}.")


def _create(options: argparse.Namespace) -> int:
    with client() as portal:
        return _show_project(options, portal.projects.create(options.name, options.title, options.manager))


def _limit(options: argparse.Namespace) -> int:
    given: dict[str, object] = {"title": options.title} if options.title else {}
    if options.partitions:
        given["partitions"] = [] if options.partitions == "all" else options.partitions.split(",")
    for key in ("gpus", "nodes", "jobs", "gpu_hours"):
        if text := getattr(options, key):
            given[key] = None if text == "none" else text
    if options.time:
        given["minutes"] = None if options.time == "none" else parse_minutes(options.time)
    with client() as portal:
        return _show_project(options, portal.projects.limit(options.name, **given))


def _close(options: argparse.Namespace) -> int:
    with client() as portal:
        return _show_project(options, portal.projects.close(options.name))


def _reopen(options: argparse.Namespace) -> int:
    with client() as portal:
        return _show_project(options, portal.projects.reopen(options.name))
