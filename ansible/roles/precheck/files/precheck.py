"""Check one host before anything of it is changed. Changes nothing.

Usage: precheck.py EXPECTED, where EXPECTED is JSON: precheck_expected of the role precheck, which sends the
program with it in place of an argument to Python's standard input.
Prints {"findings": [{"name", "host", "ok", "stops", "detail", "remedy"}, ...], "site_files": [PATH, ...],
"accounts": {NAME: UID}, "node_address": ADDRESS}. A finding that is not ok and stops means that Carme
cannot be installed as it is; the others are advice. Runs with Python 3.8 too, so that a host with an old
one gets a message. The checks lie in the modules beside it: services of the host, the site's Slurm.
"""

import grp
import json
import pwd
import shutil
import sys
from pathlib import Path

import precheck_services as services
import precheck_slurm as slurm
from precheck_findings import Problem, listed, output, version

_EXPORTER = "carme-exporter"  # the group of Carme's exporter, which must see all processes
_HIDES = "hidepid=2,gid=" + _EXPORTER

OLDEST_PYTHON = (3, 11)


def python(wanted):
    """Carme's own interpreter must be new enough."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        raise Problem(
            "Python is {}.{}, and Carme needs {}.{}.".format(*sys.version_info[:2], *OLDEST_PYTHON),
            "Install a newer Python beside it and set ansible_python_interpreter for this host to its path.",
        )
    return "Python {}.{}".format(*sys.version_info[:2])


def apptainer(wanted):
    """There must be an Apptainer that is new enough, or a way to one."""
    oldest = version(wanted["apptainer"])
    found = version(output("apptainer", "--version"))
    if found and found >= oldest:
        return "Apptainer {}.{}".format(*found)
    if wanted["apptainer_suite"]:
        return "Apptainer will come from {}".format(wanted["apptainer_suite"])
    candidate = None
    if not found:
        policy = output("apt-cache", "policy", "apptainer") or ""
        candidate = version(policy.partition("Candidate:")[2].partition("\n")[0])
        if shutil.which("dnf"):
            candidate = version(
                output("dnf", "--quiet", "repoquery", "--queryformat=%{version}\n", "apptainer")
            )
    if candidate and candidate >= oldest:
        return "the host's package sources have Apptainer {}.{}".format(*candidate)
    have = "Apptainer is {}.{}".format(*found) if found else "Apptainer is not installed"
    raise Problem(
        "{}, jobs need {}.{} or newer, and the host's package sources have none.".format(have, *oldest),
        "Install it: upstream's .deb on Debian 12, upstream's .deb or PPA on Ubuntu, from "
        "EPEL's package on the Red Hat family. On Debian 13 set base_apptainer_suite to unstable, or "
        "install upstream's .deb.",
    )


def disk(wanted):
    """The disk must have room for what is installed."""
    need = int(wanted["free_gib"])  # an inventory may quote it, or compute it with a template
    free = shutil.disk_usage("/opt" if Path("/opt").exists() else "/").free / (1 << 30)
    if free < need and not Path("/opt/carme/venv").exists():
        raise Problem(
            f"{free:.0f} GiB are free, {need} GiB are needed.",
            "Free some space below /opt, or set precheck_free_gib for this host if less is enough.",
        )
    return f"{free:.0f} GiB free"


def restore(wanted):
    """A head at work must not wait for a backup: its services would not start at the next boot."""
    if not wanted["awaits_restore"]:
        return "not awaited"
    if (output("systemctl", "is-active", "carme-broker", always=True) or "").strip() == "active":
        raise Problem(
            "carme_awaits_restore is set, and carme-broker runs on this head.",
            "Take carme_awaits_restore out of the inventory: it is for one run on a new head, with -e "
            "(docs/admins/backup.md). To restore over this head, stop 'carme-*.service' first.",
        )
    return "awaited"


def _look_up(find, key, what):
    """What the host has under a name or number; None where it has none."""
    try:
        return getattr(find(key), what)
    except KeyError:
        return None


def local_accounts(wanted):
    """Accounts that would be made must not be there with other numbers, nor their numbers be taken."""
    strange = []
    for name, written in sorted(wanted["uids"].items()):
        uid = int(written)  # an inventory may quote it, or compute it with a template
        for kind, found, owner in (
            ("uid", _look_up(pwd.getpwnam, name, "pw_uid"), _look_up(pwd.getpwuid, uid, "pw_name")),
            ("gid", _look_up(grp.getgrnam, name, "gr_gid"), _look_up(grp.getgrgid, uid, "gr_name")),
        ):
            if found is not None and found != uid:
                strange.append(f"{name} has the {kind} {found}, not {uid}")
            elif found is None and owner is not None:
                strange.append(f"{owner} has the {kind} {uid} of {name}")
    if strange:
        raise Problem(
            "{}.".format(listed(strange, "; ")),
            "Give each user of carme_users the uid that this host has for them, or another name or uid, "
            "or set users_source to existing: Carme changes the numbers of no account.",
        )
    return "{} users".format(len(wanted["uids"]))


def users(wanted):
    """Where the site itself makes accounts, each host must know all users."""
    unknown = [
        user["name"] for user in wanted["users"] if _look_up(pwd.getpwnam, user["name"], "pw_uid") is None
    ]
    if unknown:
        raise Problem(
            f"This host does not know the users {listed(unknown)}.",
            "Add them to the site's directory and have the host ask it, or set users_source to local, with a "
            "uid for each of carme_users, to have them made.",
        )
    return "{} users".format(len(wanted["users"]))


def shared(wanted):
    """Folders that all hosts share should not lie on this node's own disk."""
    own = []
    for path in wanted["shared"]:
        kind = (output("stat", "--file-system", "--format=%T", path) or "").strip()
        if kind in ("ext2/ext3", "xfs", "btrfs", "zfs", "tmpfs"):
            own.append(f"{path} ({kind})")
    if own and not wanted["head"]:
        raise Problem(
            "On this node's own disk: {}.".format(", ".join(own)),
            "They must be the same files as on the head: mount them, or name them in storage_mounts.",
            stops=False,
        )
    return "shared, or the head's"


def homes(wanted):
    """The homes of users that the host knows must lie where the broker may write."""
    outside = []
    for user in wanted["users"] if wanted["homes"] else []:
        try:
            home = Path(pwd.getpwnam(user["name"]).pw_dir)
        except KeyError:
            continue  # the role users names those that a host does not know
        if not any(Path(folder) in home.parents for folder in wanted["homes"]):
            outside.append("{} ({})".format(user["name"], home))
    if outside:
        raise Problem(
            "Outside of {} are the homes of: {}.".format(", ".join(wanted["homes"]), listed(outside)),
            "Set carme_homes to the folders below which all homes lie.",
        )
    return "where they should be"


def _has_group(name):
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _sees_hidden(account, groups, options):
    """Whether /proc is not hidden from an account, which is also in these groups."""
    for option in options:
        key, _, number = option.partition("=")
        if key == "gid":
            try:
                group = grp.getgrgid(int(number))
            except (KeyError, ValueError):
                return False
            return group.gr_name in (account, *groups) or account in group.gr_mem
    return False


def processes(wanted, mounts=Path("/proc/self/mounts")):
    """On a node that users share, /proc should show them their own processes only."""
    shown = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    options = [words[3].split(",") for words in shown if words[1:3] == ["/proc", "proc"]]
    # Of file systems that are mounted over each other the last one is seen. Older kernels write numbers.
    hidden = {"hidepid=" + value for value in ("1", "2", "4", "noaccess", "invisible", "ptraceable")}
    if options and not hidden.intersection(options[-1]):
        raise Problem(
            "/proc is mounted without hidepid: on a node that users share, each can read the command "
            "lines of the others. Carme puts no secrets into them, and leaves /proc as it is.",
            "'mount -o remount,{} /proc' hides them at once. Once Carme is installed, which makes its "
            "exporter's group, put 'proc /proc proc defaults,{} 0 0' into /etc/fstab, and do the same with "
            "'mount -o remount,{} /proc'. Without hidepid validate.yml reports an attack that "
            "succeeded.".format(_HIDES if _has_group(_EXPORTER) else "hidepid=2", _HIDES, _HIDES),
            stops=False,
        )
    groups = wanted["exporter_groups"]
    if options and _has_group(_EXPORTER) and not _sees_hidden(_EXPORTER, groups, options[-1]):
        raise Problem(
            "/proc is mounted with hidepid, also for Carme's exporter: it does not see processes on GPUs, "
            "and their metrics name no job.",
            f"Put 'proc /proc proc defaults,{_HIDES} 0 0' into /etc/fstab in place of its line for /proc, "
            f"and do the same at once with 'mount -o remount,{_HIDES} /proc'. Where /proc has a group of "
            f"yours (gid=), name it in node_exporter_groups, or add {_EXPORTER} to it and restart "
            "carme-node-exporter.",
            stops=False,
        )
    return "hidden from others"


def checks(wanted):
    """What to look at on this host."""
    table = [("python", python), ("disk", disk), ("local accounts", local_accounts)]
    if wanted["users_exist"]:
        table.append(("users", users))
    if wanted["installs_slurm"]:
        table.append(("slurm of the site", slurm.own_configuration))
    if wanted["serves_database"]:
        table.append(("mariadb", services.database))
    if wanted["metrics_ports"]:
        table.append(("ports of metrics", services.metrics_ports))
    if wanted["asks_directory"]:
        table.append(("directory", services.directory))
    if wanted["head"] or wanted["compute"]:
        table.append(("apptainer", apptainer))
    if wanted["compute"]:
        table.append(("shared folders", shared))
        if wanted["own_slurm"]:
            table += [("prolog and epilog", slurm.hooks), ("processes of others", processes)]
    if wanted["head"]:
        table += [("backup", restore), ("homes", homes), ("ports", services.ports)]
        table += [("nginx", services.default_servers), ("connections of nginx", services.connections)]
        table.append(("redis", services.redis))
        if wanted["monitoring"]:
            table.append(("prometheus", services.prometheus))
        if wanted["own_slurm"]:
            table += [("slurm", slurm.settings), ("nodes", slurm.nodes)]
            table += [("accounts", slurm.account), ("partition", slurm.partition)]
    return table


def run_check(name, check, wanted):
    """One finding."""
    result = {"name": name, "host": wanted["host"], "ok": True, "stops": False, "remedy": ""}
    try:
        result["detail"] = check(wanted)
    except Problem as problem:
        result.update(ok=False, stops=problem.stops, detail=problem.detail, remedy=problem.remedy)
    except Exception as error:  # a check that fails itself must not keep anybody from installing
        result.update(ok=False, detail=f"{type(error).__name__}: {error}", remedy="Look at this by hand.")
    return result


def main(wanted):
    """All findings of this host."""
    wanted["site_files"] = services.site_files()
    known = {}
    for user in wanted["users"]:
        try:
            known[user["name"]] = pwd.getpwnam(user["name"]).pw_uid
        except KeyError:
            continue
    found = [run_check(name, check, wanted) for name, check in checks(wanted)]
    return {
        "findings": found,
        "site_files": wanted["site_files"],
        "accounts": known,
        "node_address": slurm.node_address(wanted),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
