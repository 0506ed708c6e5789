"""What stands in the way of an installation is found first, and nothing is changed by looking."""

import ast
import grp
import importlib
import json
import os
import pwd
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port

from carme.accounts import is_account_name

from .conftest import ANSIBLE, FACTS, Playbook, show, shown

PROGRAM = ANSIBLE / "roles/precheck/files/precheck.py"

SETTINGS = """Configuration data as of 2026-11-25T10:00:00
AccountingStorageTRES   = cpu,mem,energy,node,billing,fs/disk,vmem,pages,gres/gpu
AccountingStorageType   = accounting_storage/slurmdbd
AccountingStoreFlags    = job_comment
Epilog[0]               = /etc/slurm/epilog
JobContainerType        = job_container/tmpfs
ProctrackType           = proctrack/cgroup
Prolog                  = (null)
PrologFlags             = Alloc,Contain
SLURM_VERSION           = 22.05.8
TaskPlugin              = task/affinity,task/cgroup
"""
PARTITIONS = (
    "PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES Hidden=NO State=UP\n"
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=research,vision Default=NO Hidden=NO State=UP\n"
)
ASSOCIATIONS = "root|\nroot|root\nresearch|\nresearch|ada\nteaching|\nteaching|bob\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Checks a head whose Slurm answers with what a real one writes; returns the findings by name."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def answer(name: str, script: str) -> None:
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)

    for name, text in (("config", SETTINGS), ("partition", PARTITIONS), ("association", ASSOCIATIONS)):
        (tmp_path / name).write_text(text)
    (tmp_path / "node").write_text("NodeName=gpu-01 Arch=x86_64\nNodeName=gpu-02 Arch=x86_64\n")
    answer("scontrol", f'for word; do last=$word; done; cat "{tmp_path}/$last"')
    answer("sacctmgr", f'cat "{tmp_path}/association"')
    answer("apptainer", "echo apptainer version 1.3.4-1")
    answer("ss", "true")
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)

    def check(**changes: Any) -> dict[str, Any]:
        wanted: dict[str, Any] = {
            "host": "head", "head": True, "compute": False, "own_slurm": True, "cluster": "c1",
            "monitoring": False, "awaits_restore": False, "installs_slurm": False, "asks_directory": False,
            "users_exist": False, "uids": {}, "serves_database": False, "metrics_ports": {},
            "free_gib": 0,  # this machine's disk may be nearly full
            "partition": "gpu", "account": "research", "users": [{"name": "ada", "account": ""}],
            "nodes": ["gpu-01", "gpu-02"], "node": "gpu-01", "shared": [],
            "homes": [], "ports": [443, 8081], "site_ports": [443],
            "apptainer": "1.1", "apptainer_suite": "", "default_server": True, "redis_configure": True,
        }  # fmt: skip
        command = ["python3", str(PROGRAM), json.dumps(wanted | changes)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        check.result = json.loads(done.stdout)  # type: ignore[attr-defined]
        return {finding["name"]: finding for finding in check.result["findings"]}  # type: ignore[attr-defined]

    check.answer = answer  # type: ignore[attr-defined]
    return check


def own_address() -> str:
    """An address of this host that others may reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host is in no network")
        return str(probe.getsockname()[0])


def test_users_of_a_directory_must_be_known(site: Callable[..., dict[str, Any]]) -> None:
    known = [{"name": pwd.getpwuid(os.getuid()).pw_name, "account": ""}]
    assert site(users_exist=True, users=known)["users"]["ok"]
    found = site(users_exist=True, users=[*known, {"name": "nobody-has-this", "account": ""}])["users"]
    assert not found["ok"] and found["stops"]
    assert found["detail"] == "This host does not know the users nobody-has-this."
    assert "users" not in site(users=[{"name": "nobody-has-this", "account": ""}])


def test_the_exporters_address_is_slurms_where_that_is_the_hosts(
    site: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    check: Any = site
    check.answer("scontrol", f'for word; do last=$word; done; cat "{tmp_path}/$last"')
    own = own_address()
    for address, known in (
        (own, own),
        *((foreign, "") for foreign in ("192.0.2.7", "127.0.0.7", "0.0.0.0", "")),
    ):
        (tmp_path / "gpu-01").write_text(f"NodeName=gpu-01 NodeAddr={address} NodeHostName=gpu-01\n")
        check(head=False, compute=True)
        assert check.result["node_address"] == known
    (tmp_path / "gpu-01").write_text(f"NodeName=gpu-01 NodeAddr={own}\n")
    for changes in ({"own_slurm": False}, {"compute": False}, {"node": "gpu-02"}):
        check(**{"head": False, "compute": True, **changes})
        assert check.result["node_address"] == ""


def test_the_exporters_address_may_be_a_name_in_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    precheck, own = module("precheck_slurm"), own_address()
    names = {"gpu-01": ["127.0.1.1", own], "gpu-02": ["127.0.1.1"]}

    def resolve(name: str, *_words: object) -> list[tuple[object, ...]]:
        if name not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, 0)) for address in names[name]]

    monkeypatch.setattr(precheck.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(precheck, "output", lambda *words: f"NodeName={words[-1]} NodeAddr={words[-1]}\n")
    for name, known in (("gpu-01", own), ("gpu-02", ""), ("gpu-03", ""), ("10.1.0.300", "")):
        assert precheck.node_address({"compute": True, "own_slurm": True, "node": name}) == known


def test_a_site_that_fits_has_nothing_in_the_way(site: Callable[..., dict[str, Any]]) -> None:
    found = site()
    assert {"slurm", "nodes", "accounts", "partition", "ports", "apptainer", "python"} <= set(found)
    assert [finding for finding in found.values() if not finding["ok"]] == []


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"account": "carme", "partition": "cpu"}, "accounts", "no account carme"),
        ({"account": "", "users": [{"name": "ada", "account": "nlp"}]}, "accounts", "no account nlp"),
        ({"account": "teaching"}, "partition", "gpu does not take jobs of the account teaching"),
        ({"partition": "big"}, "partition", "no partition big; it has cpu, gpu"),
        ({"nodes": ["gpu-01.example.org"]}, "nodes", "no node gpu-01.example.org; it knows gpu-01, gpu-02"),
        ({"apptainer": "9.0"}, "apptainer", "Apptainer is 1.3, jobs need 9.0"),
    ],
)
def test_what_stands_in_the_way_is_named(
    site: Callable[..., dict[str, Any]], changes: dict[str, Any], name: str, words: str
) -> None:
    found = site(**changes)
    assert [finding["name"] for finding in found.values() if finding["stops"]] == [name]
    assert words in found[name]["detail"] and found[name]["remedy"]


def test_a_python_that_suffices_for_ansible_alone_is_reported() -> None:
    """Ansible's modules run with Python 3.9, as Red Hat 9 has it, and so does this look."""
    code = (
        "import os, runpy, sys; sys.version_info = (3, 9, 2, 'final', 0); del sys.argv[0]; "
        "sys.path[0] = os.path.dirname(sys.argv[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    wanted: dict[str, Any] = {"host": "n1", "head": False, "compute": False, "own_slurm": False}
    wanted |= {
        "free_gib": 0,
        "shared": [],
        "homes": [],
        "installs_slurm": False,
        "asks_directory": False,
        "users_exist": False,
    }
    wanted |= {"users": [], "uids": {}, "monitoring": False, "serves_database": False, "metrics_ports": {}}
    command = [sys.executable, "-c", code, str(PROGRAM), json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (found,) = (finding for finding in json.loads(done.stdout)["findings"] if finding["name"] == "python")
    assert found["stops"] and found["detail"] == "Python is 3.9, and Carme needs 3.11."
    assert "set ansible_python_interpreter for this host to its path" in found["remedy"]


@pytest.mark.parametrize(
    "role",
    [
        *(f"precheck/files/{file.stem}" for file in sorted(PROGRAM.parent.glob("*.py"))),
        *("removal/files/restore_files", "removal/files/find_callers"),
        "reverse_proxy/files/certificate",
    ],
)
def test_what_runs_with_the_systems_python_is_written_for_python_3_9(role: str) -> None:
    text = (ANSIBLE / f"roles/{role}.py").read_text()
    ast.parse(text, feature_version=(3, 9))
    assert re.findall(r"\btomllib\b|\bStrEnum\b|datetime import .*\bUTC\b|strict=", text) == []


def test_without_a_default_account_every_partition_will_do(site: Callable[..., dict[str, Any]]) -> None:
    assert not [finding for finding in site(account="").values() if finding["stops"]]


def test_what_is_only_missing_is_advice(site: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    text = SETTINGS.replace("job_container/tmpfs", "(null)")
    (tmp_path / "config").write_text(text)
    found = site(users=[{"name": "eve", "account": ""}])
    assert not found["slurm"]["ok"] and not found["slurm"]["stops"]
    assert "share /tmp" in found["slurm"]["detail"]
    assert found["accounts"]["detail"] == "Without an association in Slurm: eve."
    (tmp_path / "config").write_text(text.replace("Alloc,Contain", "Alloc").replace("22.05", "21.08"))
    assert "21.08" in site()["slurm"]["detail"]


@pytest.mark.parametrize(
    ("value", "ok"), [("namespace/tmpfs", True), ("namespace/linux", True), ("(null)", False)]
)
def test_a_private_tmp_has_another_name_in_later_versions_of_slurm(
    site: Callable[..., dict[str, Any]], tmp_path: Path, value: str, ok: bool
) -> None:
    text = SETTINGS.replace("JobContainerType        = job_container/tmpfs", f"NamespaceType = {value}")
    (tmp_path / "config").write_text(text.replace("22.05.8", "26.05.1"))
    found = site()["slurm"]
    assert found["ok"] == ok
    assert ok or "NamespaceType lacks tmpfs, so jobs of different users share /tmp" in found["detail"]


def test_a_port_that_another_program_has_is_found(site: Callable[..., dict[str, Any]]) -> None:
    line = 'LISTEN 0 511 *:443 *:* users:(("apache2",pid=7,fd=4))'
    site.answer("ss", f"case \" $* \" in *:443*) echo '{line}';; esac")  # type: ignore[attr-defined]
    assert "port 443 by apache2" in site()["ports"]["detail"]
    nginx = line.replace("apache2", "nginx")
    site.answer("ss", f"case \" $* \" in *:443*) echo '{nginx}';; esac")  # type: ignore[attr-defined]
    assert site()["ports"]["ok"]


@pytest.mark.parametrize("state", ["active", "inactive"])
def test_a_head_at_work_awaits_no_backup(site: Callable[..., dict[str, Any]], state: str) -> None:
    site.answer("systemctl", f"echo {state}; test {state} = active")  # type: ignore[attr-defined]
    found = site(awaits_restore=True)["backup"]
    assert (found["stops"], "new head, with -e" in found["remedy"]) == ((state == "active"),) * 2
    assert site(awaits_restore=False)["backup"]["ok"]


def test_a_disk_without_room_is_reported(site: Callable[..., dict[str, Any]]) -> None:
    """An inventory may quote the number."""
    assert site(free_gib="0")["disk"]["ok"]
    found = site(free_gib="9000000")["disk"]
    assert (found["ok"], found["stops"]) == (False, True)
    assert "9000000 GiB are needed" in found["detail"] and "precheck_free_gib" in found["remedy"]


def test_an_absent_slurm_is_reported(site: Callable[..., dict[str, Any]]) -> None:
    site.answer("scontrol", "exit 1")  # type: ignore[attr-defined]
    assert "does not answer" in site()["slurm"]["detail"]


@pytest.mark.parametrize("form", ["Prolog = {}\n", "Prolog[0] = /nowhere/prolog\nProlog[1] = {}\n"])
def test_a_prolog_of_the_site_that_does_not_call_carmes_is_reported(
    site: Callable[..., dict[str, Any]], tmp_path: Path, form: str
) -> None:
    """Later versions of Slurm number what may be several."""
    prolog = tmp_path / "prolog"
    prolog.write_text("#!/bin/sh\n/usr/libexec/carme/prolog\n")
    text = SETTINGS.replace("Prolog                  = (null)\n", form.format(prolog))
    (tmp_path / "config").write_text(text)
    found = site(head=False, compute=True)["prolog and epilog"]
    assert (found["ok"], found["stops"]) == (False, False)
    assert found["detail"] == "Epilog does not call /usr/libexec/carme/epilog."


@pytest.mark.parametrize(
    ("lines", "hidden"),
    [
        ("proc /proc proc rw,nosuid,nodev,noexec,relatime 0 0\n", False),
        ("proc /proc proc rw,relatime,hidepid=off 0 0\n", False),
        ("proc /proc proc rw,relatime,gid=990,hidepid=invisible 0 0\n", True),
        ("proc /proc proc rw,relatime,gid=990,hidepid=2 0 0\n", True),
        ("proc /proc proc rw,hidepid=2 0 0\nproc /proc proc rw 0 0\n", False),
        ("proc /proc proc rw 0 0\nproc /srv/root/proc proc rw,hidepid=2 0 0\n", False),
    ],
)
def test_a_node_that_shows_the_processes_of_others_is_reported(
    tmp_path: Path, lines: str, hidden: bool
) -> None:
    (tmp_path / "mounts").write_text("/dev/vda / ext4 rw 0 0\n" + lines)
    found = look_at_proc(tmp_path / "mounts")
    assert (found["ok"], found["stops"]) == (hidden, False)
    if not hidden:
        assert "read the command lines of the others" in found["detail"]
        page = (ANSIBLE.parent / "docs/admins/security.md").read_text()
        (line,) = re.findall(r"'(proc .*)' into", found["remedy"])
        assert f"\n{line}\n" in page, "the page has the same line"
        first, afterwards = re.findall(r"'(mount [^']*)'", found["remedy"])
        assert first == "mount -o remount,hidepid=2 /proc", "the group is not there before the installation"
        assert f"`{afterwards}`" in page, "the page has the same command"


@pytest.mark.parametrize(
    ("options", "members", "named", "ok"),
    [
        ("hidepid=invisible", "", "", False),
        ("hidepid=invisible,gid=990", "", "", True),
        ("hidepid=invisible,gid=991", "", "", False),
        ("hidepid=invisible,gid=991", "carme-exporter", "", True),
        ("hidepid=invisible,gid=991", "", "video operators", True),
        ("hidepid=invisible,gid=992", "", "operators", False),
    ],
)
def test_a_proc_that_is_hidden_from_the_exporter_too_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, members: str, named: str, ok: bool
) -> None:
    precheck = module("precheck")
    groups = {990: ("carme-exporter", []), 991: ("operators", members.split())}
    known = {gid: grp.struct_group((name, "x", gid, users)) for gid, (name, users) in groups.items()}
    monkeypatch.setattr(precheck.grp, "getgrgid", known.__getitem__)
    monkeypatch.setattr(precheck.grp, "getgrnam", {"carme-exporter": known[990]}.__getitem__)
    (tmp_path / "mounts").write_text(f"proc /proc proc rw,{options} 0 0\n")
    found = look_at_proc(tmp_path / "mounts", *named.split())
    assert (found["ok"], found["stops"]) == (ok, False)
    if not ok:
        assert "gid=carme-exporter" in found["remedy"]


def test_proc_is_checked_on_nodes_of_the_sites_own_slurm(site: Callable[..., dict[str, Any]]) -> None:
    assert "processes of others" in site(head=False, compute=True)
    assert "processes of others" not in site(head=False, compute=True, own_slurm=False)
    assert "processes of others" not in site()


def look_at_proc(mounts: Path, *groups: str) -> dict[str, Any]:
    precheck, wanted = module("precheck"), {"host": "n", "exporter_groups": groups}
    return precheck.run_check("proc", lambda wanted: precheck.processes(wanted, mounts), wanted)


def module(name: str) -> Any:
    """One of the precheck's modules, which lie where a host finds them beside the program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROGRAM.parent)
        return importlib.import_module(name)


@pytest.mark.parametrize("daemon", ["slurmctld", "slurmdbd", "slurmd", "sackd"])
def test_a_slurm_that_runs_with_a_configuration_elsewhere_is_the_sites(
    site: Callable[..., dict[str, Any]], tmp_path: Path, daemon: str
) -> None:
    """A node without slurm.conf ("configless"), or one whose Slurm lies in /opt."""
    script = 'shift; for unit; do test "$unit" = {} && echo active || echo inactive; done; exit 3'
    site.answer("systemctl", script.format(daemon))  # type: ignore[attr-defined]
    precheck, configuration = module("precheck_slurm"), tmp_path / "slurm.conf"
    with pytest.raises(precheck.Problem) as caught:
        precheck.own_configuration({"site_files": []}, configuration)
    assert caught.value.stops and f"own: {daemon}, which runs here." in caught.value.detail
    assert "slurm_controller" in caught.value.remedy
    configuration.write_text("# Written by Ansible (role slurm_common): change the inventory instead.\n")
    assert precheck.own_configuration({"site_files": []}, configuration), "Carme's own"
    configuration.unlink()
    site.answer("systemctl", script.format("munge"))  # type: ignore[attr-defined]
    assert precheck.own_configuration({"site_files": []}, configuration), "a new host with munge"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, set()),
        ({"installs_slurm": True}, {"slurm of the site"}),
        ({"asks_directory": True}, {"directory"}),
    ],
)
def test_a_slurm_and_a_directory_are_checked_where_carme_sets_them_up(
    site: Callable[..., dict[str, Any]], changes: dict[str, Any], names: set[str]
) -> None:
    assert set(site(head=False, **changes)) & {"slurm of the site", "directory"} == names


def test_no_account_of_the_host_is_given_another_number(site: Callable[..., dict[str, Any]]) -> None:
    """The modules user and group would change the number, and files would lose their owner."""
    users = {entry.pw_name: entry.pw_uid for entry in pwd.getpwall()}
    free = max(65_000, *(uid for uid in users.values() if uid < 2**31 - 10)) + 5
    assert site(uids={"nobody-has-this": free})["local accounts"]["ok"]
    found = site(uids={"root": free})["local accounts"]
    assert found["stops"] and f"root has the uid 0, not {free}" in found["detail"]
    assert f"root has the gid 0, not {free}" in found["detail"]
    assert site(uids={"root": 0})["local accounts"]["ok"] and site(uids={"root": "0"})["local accounts"]["ok"]
    found = site(uids={"root": str(free)})["local accounts"]
    assert found["stops"] and f"root has the uid 0, not {free}" in found["detail"], "a quoted number"
    found = site(uids={"nobody-has-this": 0})["local accounts"]
    assert found["stops"] and "root has the uid 0 of nobody-has-this" in found["detail"]


def inventory(tmp_path: Path, **variables: Any) -> Path:
    everywhere = {"ansible_connection": "local", "ansible_become": False, "carme_default_partition": "gpu"}
    everywhere |= {"precheck_free_gib": 0}  # this machine's disk may be nearly full
    hosts = {
        "head": {"hosts": {"portal": None}},
        "compute": {"hosts": {"gpu-01.example.org": None}},
        "all": {"vars": everywhere | variables},
    }
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(hosts))
    return path


def precheck_play() -> dict[str, Any]:
    """The play that looks at a site, with the facts that it gathers there.

    Alone: nothing here may run the whole playbook, which would install Carme on this machine.
    """
    (first, *_) = yaml.safe_load((ANSIBLE / "site.yml").read_text())
    return first | {"hosts": "head:compute"}


def test_a_site_is_checked_by_a_playbook(
    playbook: Playbook, site: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    play = tmp_path / "look.yml"
    play.write_text(json.dumps([precheck_play()]))
    settings = {"carme_site_url": "https://portal:9443", "carme_cluster": "c1"}
    hosts = inventory(tmp_path, **settings, carme_default_account="carme")
    done = playbook("-i", hosts, play)
    text = " ".join(done.stdout.split())
    assert done.returncode != 0, text
    assert "Slurm knows no node gpu-01.example.org" in text and "carme_node_name" in text
    assert "Slurm has no account carme" in text
    # The site's short names, and no account at all: Slurm gives each user their own.
    hosts = inventory(tmp_path, **settings, carme_node_name="{{ inventory_hostname_short }}")
    done = playbook("-i", hosts, play)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=0" in done.stdout and "changed=1" not in done.stdout


def test_a_site_has_more_users_than_one_argument_holds(
    playbook: Playbook, site: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    users = [{"name": f"user{number:05}", "account": "research"} for number in range(4000)]
    assert len(json.dumps(users)) > 131_072, "what the kernel takes as one argument"
    play = tmp_path / "look.yml"
    play.write_text(json.dumps([precheck_play()]))
    settings = {"carme_site_url": "https://portal:9443", "carme_cluster": "c1", "carme_users": users}
    # Accounts would be made, or be there already: what the host has of them would be findings.
    settings |= {"carme_node_name": "{{ inventory_hostname_short }}", "users_source": "ldap"}
    done = playbook("-i", inventory(tmp_path, **settings), play)
    text = " ".join(done.stdout.split())
    assert done.returncode == 0, text[-4000:]
    assert "Without an association in Slurm: user00000, " in text
    assert "user00019, and 3980 more." in text and "user00020" not in text


@pytest.mark.parametrize(
    ("limit", "left_out"), [("portal", "gpu-01.example.org"), ("gpu-01.example.org", "portal")]
)
def test_a_limited_run_knows_the_addresses_of_the_others(
    playbook: Playbook, site: Callable[..., dict[str, Any]], tmp_path: Path, limit: str, left_out: str
) -> None:
    play = tmp_path / "look.yml"
    facts = f"hostvars['{left_out}']"
    known = f"[{facts}.precheck_node_address | default('-'), {facts}.ansible_facts.keys() | list]"
    play.write_text(
        json.dumps([precheck_play(), {"hosts": limit, "gather_facts": False, "tasks": [show(known)]}])
    )
    settings = {"carme_site_url": "https://portal:9443", "carme_cluster": "c1"}
    hosts = inventory(tmp_path, **settings, carme_node_name="{{ inventory_hostname_short }}")
    ((address, facts),) = shown(playbook("-i", hosts, "--limit", limit, play))[limit]
    assert "default_ipv4" in facts
    assert address == ("" if limit == "portal" else "-"), "only nodes are reached by Slurm"


def test_a_limited_run_names_who_does_not_answer(
    playbook: Playbook, site: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    play = tmp_path / "look.yml"
    play.write_text(json.dumps([precheck_play()]))
    settings = {"carme_site_url": "https://portal:9443", "carme_cluster": "c1"}
    hosts = inventory(tmp_path, **settings, carme_node_name="{{ inventory_hostname_short }}")
    described = json.loads(hosts.read_text())
    gone = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": free_port()}
    described["compute"]["hosts"]["gpu-01.example.org"] = gone
    hosts.write_text(json.dumps(described))
    done = playbook("-i", hosts, "--limit", "portal", play)
    text = " ".join(done.stdout.split())
    assert done.returncode == 2, text
    assert "--limit leaves gpu-01.example.org out, and it cannot be reached or has no default route" in text
    done = playbook("-i", hosts, "--limit", "portal", "--tags", "portal", play)
    assert done.returncode == 0, "the portal needs no address of a node: " + done.stdout
    described["compute"]["hosts"]["gpu-01.example.org"] |= {"node_exporter_address": "10.1.0.11"}
    hosts.write_text(json.dumps(described))
    done = playbook("-i", hosts, "--limit", "portal", play)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_carme_sets_up_itself_is_what_the_inventory_says(
    playbook: Playbook, site: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    play = tmp_path / "look.yml"
    tasks = [{"ansible.builtin.include_vars": {"file": f"{{{{ {name} }}}}"}} for name in ("usual", "known")]
    precheck_play = {"hosts": "head:compute", "gather_facts": False, "roles": ["carme"]}
    play.write_text(json.dumps([precheck_play | {"tasks": [*tasks, show("precheck_expected")]}]))
    role = ANSIBLE / "roles/precheck"
    known = {"usual": str(role / "defaults/main.yml"), "known": str(role / "vars/main.yml")}
    options = ("-e", json.dumps(known | {"ansible_facts": FACTS}))

    def expected(groups: dict[str, list[str]], **variables: Any) -> dict[str, Any]:
        """What is expected of each host."""
        hosts = inventory(tmp_path, carme_site_url="https://portal", **variables)
        described = json.loads(hosts.read_text())
        for group, members in groups.items():
            described[group] = {"hosts": dict.fromkeys(members)}
        hosts.write_text(json.dumps(described))
        return {host: found for host, (found,) in shown(playbook("-i", hosts, *options, play)).items()}

    users = [{"name": "ada", "uid": 2001}]
    found = expected({}, carme_users=users)["portal"]
    assert (found["uids"], found["installs_slurm"], found["asks_directory"]) == ({"ada": 2001}, False, False)
    found = expected({}, carme_users=users, users_source="ldap")["portal"]
    assert (found["uids"], found["asks_directory"], found["users_exist"]) == ({}, True, False)
    assert expected({}, carme_users=users, users_source="existing")["portal"]["users_exist"] is True
    both = {"slurm_controller": ["portal"], "slurm_database": ["portal"]}
    found = expected(both)
    head, node = found["portal"], found["gpu-01.example.org"]
    assert (head["installs_slurm"], node["installs_slurm"]) == (True, False)
    assert (int(head["free_gib"]), int(node["free_gib"])) == (20, 5)
    assert (head["serves_database"], node["serves_database"]) == (True, False)
    assert node["metrics_ports"] == {"carme-node-exporter": 9750}
    assert head["metrics_ports"] == {"carme-cluster-exporter": 9751}
    prometheus = {"prometheus": 9090, "prometheus-alertmanager": 9093}
    found = expected({"monitoring": ["portal"]})["portal"]
    assert found["metrics_ports"] == {"carme-cluster-exporter": 9751} | prometheus


def test_hosts_with_slurms_commands_need_a_slurm_that_carme_installs(
    playbook: Playbook, tmp_path: Path
) -> None:
    play = tmp_path / "look.yml"
    play.write_text(json.dumps([{"hosts": "head:compute", "gather_facts": False, "roles": ["carme"]}]))
    hosts = inventory(tmp_path)
    described = json.loads(hosts.read_text()) | {"slurm_client": {"hosts": {"portal": None}}}
    hosts.write_text(json.dumps(described))
    done = playbook("-i", hosts, "-e", json.dumps({"ansible_facts": FACTS}), play)
    text = " ".join(done.stdout.split())
    assert done.returncode != 0 and "Leave all four slurm_* groups empty" in text


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--tags", "precheck"], set()),
        ([], {"hub", "heads"}),
        # Prometheus of two heads needs what the role heads installs.
        (["--tags", "monitoring"], {"heads", "cluster_exporter"}),
        (["--skip-tags", "monitoring"], {"hub", "heads"}),
    ],
)
def test_the_roles_run_that_are_requested_each_once(
    playbook: Playbook, tmp_path: Path, arguments: list[str], wanted: set[str]
) -> None:
    # Beside a copy of the playbook lie roles that only say their names.
    plays = yaml.safe_load((ANSIBLE / "site.yml").read_text())
    names = {role["role"] for play in plays for role in play["roles"]}
    for name in names:
        (tmp_path / "roles" / name / "tasks").mkdir(parents=True)
        message = [{"name": "Say it", "ansible.builtin.debug": {"msg": f"ran-{name}."}}]
        (tmp_path / "roles" / name / "tasks/main.yml").write_text(yaml.safe_dump(message))
    for play in plays:
        play["gather_facts"] = False
    (tmp_path / "site.yml").write_text(yaml.safe_dump(plays))
    done = playbook(*arguments, "-i", inventory(tmp_path), tmp_path / "site.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    ran = {name for name in names if f"ran-{name}." in done.stdout}
    assert {"base"} | wanted <= ran if wanted else ran == {"carme", "precheck"}
    assert done.stdout.count("ran-heads.") == ("heads" in wanted)


def test_homes_elsewhere_are_noticed(site: Callable[..., dict[str, Any]]) -> None:
    """The broker may write in the folders of homes alone, so sessions could not start."""
    users = [{"name": "root", "account": ""}, {"name": "not-known-here", "account": ""}]
    found = site(users=users, homes=["/home"])["homes"]
    assert not found["ok"] and found["stops"]
    assert "root (/root)" in found["detail"] and "carme_homes" in found["remedy"]
    assert site(users=users, homes=["/home", "/"])["homes"]["ok"]


def test_the_inventory_takes_the_names_that_the_portal_takes() -> None:
    text = (ANSIBLE / "roles/carme/vars/main.yml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("carme_user_pattern:"))
    pattern = line.split("'")[1]
    for name in (
        "m_smith",
        "anna.maria",
        "x@lab.org",
        "7up",
        "_x",
        "a" * 64,
        "a" * 65,
        "123",
        "",
        "a b",
        "-x",
        "a/b",
    ):
        assert bool(re.match(pattern, name)) == is_account_name(name), name
