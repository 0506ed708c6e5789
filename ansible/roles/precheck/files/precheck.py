"""Look at one host before anything of it is changed. Changes nothing.

Usage: precheck.py EXPECTED, where EXPECTED is JSON: precheck_expected of the role precheck.
Prints {"findings": [{"name", "host", "ok", "stops", "detail", "remedy"}, ...], "site_files": [PATH, ...],
"accounts": {NAME: UID}, "node_address": ADDRESS}. A finding that is not ok and stops means that Carme
cannot be installed as it is; the others are advice. Runs with Python 3.8 too, so that a host with an old
one gets a message.
"""

import grp
import ipaddress
import json
import pwd
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

#: Settings of Slurm without which Carme does not work, with the words that they must hold.
NEEDED = {
    "AccountingStorageType": ("slurmdbd",),
    "ProctrackType": ("cgroup",),
    "PrologFlags": ("Contain", "contain"),
}
#: And those that a site may leave out, with what is missing then.
ADVISED = {
    "AccountingStoreFlags": ("job_comment", "the job history does not show which jobs were sessions"),
    "AccountingStorageTRES": ("gres/gpu", "the accounting does not count GPUs"),
    "JobContainerType": ("tmpfs", "jobs of different users share /tmp"),
    "TaskPlugin": ("cgroup", "jobs are not kept to their own GPUs and memory"),
}
OLDEST_SLURM = (22, 5)
OLDEST_PYTHON = (3, 11)
DISK_GIB = {"head": 20, "compute": 5}
#: Files of other programs that roles would write.
NGINX = "/etc/nginx/nginx.conf"
FOREIGN_FILES = (
    *("/etc/apptainer/apptainer.conf", "/etc/redis/redis.conf"),
    *(NGINX, "/etc/nginx/sites-enabled/default", "/etc/prometheus/prometheus.yml"),
    *("/etc/prometheus/alertmanager.yml", "/etc/sssd/sssd.conf"),
    *("/etc/slurm/slurm.conf", "/etc/slurm/gres.conf", "/etc/slurm/cgroup.conf"),
    *("/etc/slurm/job_container.conf", "/etc/slurm/slurmdbd.conf"),
)
SLURMS_DAEMONS = ("slurmctld", "slurmdbd", "slurmd", "sackd")
OURS = re.compile(r"^# Written by Ansible \(role \w+\)", re.MULTILINE)


class Problem(Exception):
    """What was found instead of what is needed, and what to do."""

    def __init__(self, detail, remedy, stops=True):
        super().__init__(detail)
        self.detail, self.remedy, self.stops = detail, remedy, stops


def output(*command, **options):
    """The output of a command; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 or options.get("always") else None


def version(text):
    """The first two numbers of a version in a text; None without one."""
    match = re.search(r"(\d+)\.(\d+)", text or "")
    return (int(match.group(1)), int(match.group(2))) if match else None


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
    need = DISK_GIB["head" if wanted["head"] else "compute"]
    free = shutil.disk_usage("/opt" if Path("/opt").exists() else "/").free / (1 << 30)
    if free < need and not Path("/opt/carme/venv").exists():
        raise Problem(f"{free:.0f} GiB are free, {need} GiB are needed.", "Make room below /opt.")
    return f"{free:.0f} GiB free"


def listener(port):
    """The names of the programs that listen on a TCP port; None where that cannot be found out."""
    shown = output(
        "ss", "--no-header", "--tcp", "--listening", "--numeric", "--processes", "sport", "=", f":{port}"
    )
    return (
        None
        if shown is None
        else sorted(set(re.findall(r'\(\("([^"]+)"', shown)) or ({"?"} if shown.strip() else ()))
    )


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


def ports(wanted):
    """The ports of the head must be free, or ours."""
    taken = []
    installed = Path("/etc/carme/carme.toml").exists()
    for port in wanted["ports"]:
        programs = listener(port)
        if not programs or (programs == ["nginx"] and port in wanted["site_ports"]):
            continue
        if not installed or port in wanted["site_ports"]:
            taken.append("port {} by {}".format(port, ", ".join(programs)))
    if taken:
        raise Problem(
            "In use are: {}.".format("; ".join(taken)),
            "Stop these programs, or give carme_site_url another port (https://HOST:PORT).",
        )
    return "free, or nginx's"


def other_sites(site_files, root=Path("/etc/nginx")):
    """The files of nginx's other sites, with their texts; without ours and the welcome page."""
    found = {}
    for path in [*root.glob("sites-enabled/*"), *root.glob("conf.d/*.conf")]:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        if OURS.search(text) or (path.name == "default" and str(path) not in site_files):
            continue  # the welcome page makes room
        found[path] = text
    return found


def default_servers(wanted, root=Path("/etc/nginx")):
    """No other site of nginx may be the default server of our port."""
    found = []
    for path, text in other_sites(wanted["site_files"], root).items():
        for port, rest in re.findall(r"^\s*listen\s+(?:\S*:)?(\d+)([^;]*);", text, re.MULTILINE):
            if int(port) in wanted["site_ports"] and "default_server" in rest:
                found.append(f"{path} (port {port})")
    if found and wanted["default_server"]:
        raise Problem(
            "nginx has a default server already: {}.".format(", ".join(found)),
            "Set reverse_proxy_default_server to false: Carme then answers for the host of "
            "carme_site_url alone.",
        )
    return "no conflict"


def connections(wanted, root=Path("/etc/nginx")):
    """An nginx of the site's own should hold many connections; its nginx.conf is left as it is."""
    path = root / "nginx.conf"
    if str(path) not in wanted["site_files"]:
        return "ours to set"
    match = re.search(r"^[^#\n]*\bworker_connections\s+(\d+)", path.read_text(errors="replace"), re.MULTILINE)
    allowed = int(match.group(1)) if match else 512
    least = wanted["connections"]
    if allowed < least:
        raise Problem(
            f"{path} is the site's own, and each worker of nginx may hold {allowed} connections.",
            f"Set 'worker_connections {least};' in it: an open notebook holds a dozen of them. Until "
            "then the portal fails when many users are there.",
            stops=False,
        )
    return str(allowed)


def redis(wanted):
    """A Redis that serves others must not be turned into ours."""
    if wanted["redis_configure"] and "/etc/redis/redis.conf" in wanted["site_files"]:
        raise Problem(
            "/etc/redis/redis.conf is the site's own, and Carme would replace it (no port, a socket "
            "of its own).",
            "Give it 'unixsocket /run/redis/redis-server.sock' and 'unixsocketperm 770' and set "
            "redis_configure to false, or "
            "move that Redis to another host.",
        )
    return "ours, or as it came"


def prometheus(wanted):
    """A Prometheus that watches other things must not be turned into ours."""
    mine = [path for path in wanted["site_files"] if path.startswith("/etc/prometheus/")]
    if mine:
        raise Problem(
            "The site's own: {}.".format(", ".join(mine)),
            "Take the head out of the group 'monitoring'; your Prometheus can scrape the exporters "
            "(docs/admins/monitoring.md).",
        )
    return "ours, or as it came"


def own_configuration(wanted, configuration=Path("/etc/slurm/slurm.conf")):
    """A host on which the roles set up Slurm must not have a Slurm of the site's own, wherever that lies."""
    found = [path for path in wanted["site_files"] if path.startswith("/etc/slurm/")]
    if not (configuration.exists() and OURS.search(configuration.read_text(errors="replace"))):
        states = {unit: output("systemctl", "is-active", unit, always=True) or "" for unit in SLURMS_DAEMONS}
        found += [f"{unit}, which runs here" for unit, state in states.items() if state.strip() == "active"]
    if found:
        raise Problem(
            "The site's own: {}. Carme would replace what it has of Slurm.".format(", ".join(found)),
            "Leave the inventory groups slurm_controller, slurm_database, slurm_node and slurm_client "
            "empty: a Slurm that runs already stays as it is. If Carme is to set Slurm up anew, stop it and "
            "move these files away first.",
        )
    return "ours, or none"


def directory(wanted):
    """An SSSD that asks a directory already must not be turned into ours."""
    if "/etc/sssd/sssd.conf" in wanted["site_files"]:
        raise Problem(
            "/etc/sssd/sssd.conf is the site's own, and Carme would replace it.",
            "Set users_source to existing: this host asks a directory already. If Carme is to "
            "configure it, move that file away first.",
        )
    return "ours, or none"


def _known(find, key, what):
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
            ("uid", _known(pwd.getpwnam, name, "pw_uid"), _known(pwd.getpwuid, uid, "pw_name")),
            ("gid", _known(grp.getgrnam, name, "gr_gid"), _known(grp.getgrgid, uid, "gr_name")),
        ):
            if found is not None and found != uid:
                strange.append(f"{name} has the {kind} {found}, not {uid}")
            elif found is None and owner is not None:
                strange.append(f"{owner} has the {kind} {uid} of {name}")
    if strange:
        raise Problem(
            "{}.".format("; ".join(strange)),
            "Give each user of carme_users the uid that this host has for them, or another name or uid, "
            "or set users_source to existing: Carme changes the numbers of no account.",
        )
    return "{} users".format(len(wanted["uids"]))


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
            "Outside of {} are the homes of: {}.".format(", ".join(wanted["homes"]), ", ".join(outside)),
            "Set carme_homes to the folders below which all homes lie.",
        )
    return "where they should be"


def slurm_settings(text):
    """The settings in `scontrol show config`."""
    return {key: value.strip() for key, value in re.findall(r"^(\w+)\s*=(.*)$", text or "", re.MULTILINE)}


def fields(line):
    """The pairs of a line of `scontrol --oneliner`."""
    return dict(re.findall(r"(\w+)=(\S*)", line))


def away():
    """What to say where Slurm does not answer."""
    return Problem(
        "Slurm's commands are missing on the head, or the controller does not answer them.",
        "Install them with slurm.conf and munge's key as on a login host; 'scontrol show config' "
        "must work as root.",
    )


def slurm(wanted):
    """The site's Slurm must be new enough and have the settings that Carme relies on."""
    found = slurm_settings(output("scontrol", "show", "config"))
    if not found:
        raise away()
    have = version(found.get("SLURM_VERSION"))
    if have and have < OLDEST_SLURM:
        raise Problem("Slurm is {}.{:02d}.".format(*have), "Carme needs 22.05 or newer.")
    lacking = [
        "{} is {}".format(key, found.get(key) or "not set")
        for key, words in NEEDED.items()
        if not any(word in found.get(key, "") for word in words)
    ]
    if lacking:
        raise Problem(
            "{}.".format("; ".join(lacking)),
            "docs/admins/install.md, 'A Slurm that you run already', says which settings Carme relies on.",
        )
    lacking = [
        f"{key} lacks {word}, so {what}"
        for key, (word, what) in ADVISED.items()
        if word not in found.get(key, "")
    ]
    if lacking:
        raise Problem(
            "{}.".format("; ".join(lacking)), "Add them to slurm.conf as install.md shows.", stops=False
        )
    return found.get("SLURM_VERSION", "")


def nodes(wanted):
    """The inventory's compute hosts must be nodes of Slurm."""
    shown = output("scontrol", "--oneliner", "show", "node")
    if shown is None:
        raise away()
    known = [fields(line).get("NodeName", "") for line in shown.splitlines()]
    strange = [name for name in wanted["nodes"] if name not in known]
    if strange:
        raise Problem(
            "Slurm knows no node {}; it knows {}.".format(", ".join(strange), ", ".join(known[:8]) or "none"),
            "Set carme_node_name to the name that Slurm has for the host, for example to "
            "'{{ inventory_hostname_short }}' for the group compute.",
        )
    return "{} nodes".format(len(wanted["nodes"]))


def account(wanted):
    """The default account must exist, and every user must have an association."""
    shown = output("sacctmgr", "--noheader", "--parsable2", "--readonly", "show", "association",
                   "where", "cluster=" + wanted["cluster"], "format=account,user")  # fmt: skip
    if shown is None:
        raise Problem(
            "sacctmgr does not answer on the head.",
            "See that slurmdbd runs; 'sacctmgr show cluster' must work as root.",
        )
    pairs = [tuple(line.split("|")) for line in shown.splitlines() if "|" in line]
    if not pairs:
        raise Problem(
            "Slurm's accounting has no cluster {}.".format(wanted["cluster"]),
            "Set carme_cluster to its name; 'sacctmgr show cluster' lists them.",
        )
    accounts = {name for name, _user in pairs}
    requested = [wanted["account"], *(user["account"] for user in wanted["users"])]
    strange = sorted({name for name in requested if name and name not in accounts})
    if strange:
        raise Problem(
            "Slurm has no account {}.".format(", ".join(strange)),
            "Correct carme_default_account and the accounts of carme_users ('sacctmgr show account' "
            "lists them), or leave them "
            "empty: then each user's own default account pays.",
        )
    known = {user for _name, user in pairs}
    lacking = [user["name"] for user in wanted["users"] if user["name"] not in known]
    if lacking:
        raise Problem(
            "Without an association in Slurm: {}.".format(", ".join(lacking)),
            "sacctmgr add user NAME account=ACCOUNT; until then Slurm refuses their jobs.",
            stops=False,
        )
    return f"{len(accounts)} accounts"


def partition(wanted):
    """The default partition must be there and take the default account's jobs."""
    shown = output("scontrol", "--oneliner", "--all", "show", "partition")
    if shown is None:
        raise away()
    known = {found.get("PartitionName", ""): found for found in map(fields, shown.splitlines())}
    name = wanted["partition"]
    if name not in known:
        raise Problem(
            "Slurm has no partition {}; it has {}.".format(name, ", ".join(sorted(known)) or "none"),
            "Set carme_default_partition to the one in which sessions run unless their owners choose "
            "another.",
        )
    allowed = known[name].get("AllowAccounts", "ALL")
    denied = known[name].get("DenyAccounts", "")
    paying = wanted["account"]
    if paying and ((allowed != "ALL" and paying not in allowed.split(",")) or paying in denied.split(",")):
        raise Problem(
            "The partition {} does not take jobs of the account {} (AllowAccounts={}{}).".format(
                name, paying, allowed, ", DenyAccounts=" + denied if denied else ""
            ),
            "Choose another carme_default_account or carme_default_partition, or add the account to "
            "AllowAccounts.",
        )
    return name


def hooks(wanted):
    """The site's prolog and epilog should call Carme's."""
    found = slurm_settings(output("scontrol", "show", "config"))
    lacking = []
    for setting in ("Prolog", "Epilog"):
        mine = "/usr/libexec/carme/" + setting.lower()
        paths = [path for path in re.split(r"[,\s]+", found.get(setting, "")) if path.startswith("/")]
        files = [file for path in paths for file in Path(path).parent.glob(Path(path).name)]
        if not any(
            str(file) == mine or mine in file.read_text(errors="replace") for file in files if file.is_file()
        ):
            lacking.append(f"{setting} does not call {mine}")
    if lacking:
        raise Problem(
            "; ".join(lacking) + ".",
            "Call them from yours, or name them in slurm.conf (Slurm takes several). Without them no "
            "data is brought to jobs, and "
            "metrics do not know whose a job is.",
            stops=False,
        )
    return "called"


def _counted(path):
    """A file of nginx's without its number of connections."""
    return re.sub(r"\b(worker_connections\s+)\d+", r"\1", path.read_text(errors="replace"))


def belongs_to_site(path):
    """Whether somebody has changed a file since its package brought it, and it was not one of our roles."""
    if not path.exists():
        return False
    if OURS.search(path.read_text(errors="replace")):
        return False
    if path.name == Path(NGINX).name and any(
        _counted(one) == _counted(path) for one in path.parent.glob(f"{path.name}.*~")
    ):
        return False  # since its backup only our role's number has changed, which bears no mark
    real = path.resolve()
    if shutil.which("dpkg"):
        owner = (output("dpkg", "--search", str(real)) or "").split(":")[0]
        return not owner or str(real) in (output("dpkg", "--verify", owner, always=True) or "")
    owner = (output("rpm", "--query", "--file", str(real)) or "").strip()
    return not owner or str(real) in (output("rpm", "--verify", owner, always=True) or "")


def checks(wanted):
    """What to look at on this host."""
    table = [("python", python), ("disk", disk), ("local accounts", local_accounts)]
    if wanted["installs_slurm"]:
        table.append(("slurm of the site", own_configuration))
    if wanted["asks_directory"]:
        table.append(("directory", directory))
    if wanted["head"] or wanted["compute"]:
        table.append(("apptainer", apptainer))
    if wanted["compute"]:
        table.append(("shared folders", shared))
        if wanted["own_slurm"]:
            table.append(("prolog and epilog", hooks))
    if wanted["head"]:
        table += [("backup", restore), ("homes", homes), ("ports", ports), ("nginx", default_servers)]
        table += [("connections of nginx", connections), ("redis", redis)]
        if wanted["monitoring"]:
            table.append(("prometheus", prometheus))
        if wanted["own_slurm"]:
            table += [("slurm", slurm), ("nodes", nodes), ("accounts", account), ("partition", partition)]
    return table


def look(name, check, wanted):
    """One finding."""
    result = {"name": name, "host": wanted["host"], "ok": True, "stops": False, "remedy": ""}
    try:
        result["detail"] = check(wanted)
    except Problem as problem:
        result.update(ok=False, stops=problem.stops, detail=problem.detail, remedy=problem.remedy)
    except Exception as error:  # a check that fails itself must not keep anybody from installing
        result.update(ok=False, detail=f"{type(error).__name__}: {error}", remedy="Look at this by hand.")
    return result


def site_files():
    """Files of other programs that are the site's: what it changed, and nginx.conf beside its own pages."""
    found = [path for path in FOREIGN_FILES if belongs_to_site(Path(path))]
    if NGINX not in found and Path(NGINX).exists() and other_sites(found):
        found.append(NGINX)
    return found


def node_address(wanted):
    """Where Slurm reaches this compute node (NodeAddr), if that is an address of this host; else empty.

    An address that others do not reach, as 127.0.0.1, is none.
    """
    if not (wanted["compute"] and wanted["own_slurm"]):
        return ""
    shown = output("scontrol", "--oneliner", "show", "node", wanted["node"]) or ""
    address = fields(shown).get("NodeAddr", "")
    return next((one for one in _addresses(address) if _is_own(one)), "") if address else ""


def _addresses(host):
    """An address itself, or those of version 4 that a name has."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    try:
        return [found[4][0] for found in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_DGRAM)]
    except (ValueError, OSError):
        return []


def _is_own(text):
    """Whether it is an address of this host that others may reach."""
    address = ipaddress.ip_address(text)
    if address.is_loopback or address.is_unspecified:
        return False
    try:
        kind = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.bind((text, 0))  # Linux lets nobody take an address that is another host's
    except OSError:
        return False
    return True


def main(wanted):
    """All findings of this host."""
    wanted["site_files"] = site_files()
    known = {}
    for user in wanted["users"]:
        try:
            known[user["name"]] = pwd.getpwnam(user["name"]).pw_uid
        except KeyError:
            continue
    found = [look(name, check, wanted) for name, check in checks(wanted)]
    return {
        "findings": found,
        "site_files": wanted["site_files"],
        "accounts": known,
        "node_address": node_address(wanted),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
