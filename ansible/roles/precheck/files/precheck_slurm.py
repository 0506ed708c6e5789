"""The site's Slurm: settings, nodes, accounts, partition, prolog and epilog, and where it reaches a node."""

import ipaddress
import re
import socket
from pathlib import Path

from precheck_findings import WRITTEN_BY_ANSIBLE, Problem, listed, output, version

#: Settings of Slurm without which Carme does not work, with the words that they must hold.
NEEDED = {
    "AccountingStorageType": ("slurmdbd",),
    "ProctrackType": ("cgroup",),
    "PrologFlags": ("Contain", "contain"),
}
#: Settings that a site may leave out: the words (one of them must be there), and what is missing otherwise.
ADVISED = {
    "AccountingStoreFlags": (("job_comment",), "the job history does not show which jobs were sessions"),
    "AccountingStorageTRES": (("gres/gpu",), "the accounting does not count GPUs"),
    "JobContainerType": (("tmpfs", "linux"), "jobs of different users share /tmp"),
    "TaskPlugin": (("cgroup",), "jobs are not kept to their own GPUs and memory"),
}
#: What later versions of Slurm call a setting: from 25.11 on.
RENAMED = {"JobContainerType": "NamespaceType"}
OLDEST_SLURM = (22, 5)
SLURMS_DAEMONS = ("slurmctld", "slurmdbd", "slurmd", "sackd")


def own_configuration(wanted, configuration=Path("/etc/slurm/slurm.conf")):
    """A host on which the roles set up Slurm must not have a Slurm of the site's own, wherever that lies."""
    found = [path for path in wanted["site_files"] if path.startswith("/etc/slurm/")]
    if not (configuration.exists() and WRITTEN_BY_ANSIBLE.search(configuration.read_text(errors="replace"))):
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


def slurm_settings(text):
    """The settings in `scontrol show config`; of Prolog[0], Prolog[1] and the like one with commas."""
    found = {}
    for key, number, value in re.findall(r"^(\w+)(?:\[(\d+)\])?\s*=(.*)$", text or "", re.MULTILINE):
        before = found[key] + "," if number and key in found else ""
        found[key] = before + value.strip()
    return found


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


def settings(wanted):
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
    lacking = []
    for setting, (words, what) in ADVISED.items():
        key = RENAMED[setting] if RENAMED.get(setting) in found else setting
        if not any(word in found.get(key, "") for word in words):
            lacking.append(f"{key} lacks {words[0]}, so {what}")
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
            "Slurm knows no node {}; it knows {}.".format(listed(strange), ", ".join(known[:8]) or "none"),
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
            "Check that slurmdbd runs; 'sacctmgr show cluster' must work as root.",
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
            f"Slurm has no account {listed(strange)}.",
            "Correct carme_default_account and the accounts of carme_users ('sacctmgr show account' "
            "lists them), or leave them "
            "empty: then each user's own default account pays.",
        )
    known = {user for _name, user in pairs}
    lacking = [user["name"] for user in wanted["users"] if user["name"] not in known]
    if lacking:
        raise Problem(
            f"Without an association in Slurm: {listed(lacking)}.",
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
        hook = "/usr/libexec/carme/" + setting.lower()
        paths = [path for path in re.split(r"[,\s]+", found.get(setting, "")) if path.startswith("/")]
        files = [file for path in paths for file in Path(path).parent.glob(Path(path).name)]
        if not any(
            str(file) == hook or hook in file.read_text(errors="replace") for file in files if file.is_file()
        ):
            lacking.append(f"{setting} does not call {hook}")
    if lacking:
        raise Problem(
            "; ".join(lacking) + ".",
            "Call them from yours, or name them in slurm.conf (Slurm takes several). Without them no "
            "data is brought to jobs, and "
            "metrics do not know whose a job is.",
            stops=False,
        )
    return "called"


def node_address(wanted):
    """Where Slurm reaches this compute node (NodeAddr), if that is an address of this host; else empty.

    An address that others do not reach, as 127.0.0.1, is none.
    """
    if not (wanted["compute"] and wanted["own_slurm"]):
        return ""
    shown = output("scontrol", "--oneliner", "show", "node", wanted["node"]) or ""
    address = fields(shown).get("NodeAddr", "")
    return next((each for each in _addresses(address) if _is_own(each)), "") if address else ""


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
