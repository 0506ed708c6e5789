"""Room for hundreds of servers on the demo: accounts, large nodes, and stand-ins for what sessions run."""

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from demo_site import DemoSite, wait_until

FOLDER = "/scratch/carme-benchmark"
STAND_IN = f"{FOLDER}/stand_in.py"
ACCOUNTS = [f"crowd{number:02}" for number in range(1, 51)]
FIRST_UID = 61_001
#: What every job of a session runs on its node.
PROGRAM = "/opt/carme/venv/bin/carme-job"
CONFIGURATION = "/etc/slurm/slurm.conf"
#: Nodes that claim to be large; and patient daemons, for the demo's own give a busy node up after 6 seconds.
LARGE = {"CPUs": "1024", "RealMemory": "4000000"}
PATIENT = {"SlurmdTimeout": "300", "TCPTimeout": "10", "MessageTimeout": "60"}


ADD = """
home=$1; uid=$2; shift 2
for name; do useradd --uid "$uid" "$home" --shell /bin/bash "$name"; uid=$((uid + 1)); done
"""


@contextlib.contextmanager
def crowd(site: DemoSite) -> Iterator[None]:
    """Let the demo hold hundreds of servers until the block is left; then it is as it was."""
    disperse(site)
    try:
        code = (Path(__file__).parent / "stand_in.py").read_text()
        site.run("head", "install", "-D", "-m", "0644", "/dev/stdin", STAND_IN, data=code)
        for host in hosts(site):
            home = "--create-home" if host == "head" else "--no-create-home"
            site.run(
                host,
                "sh",
                "-ec",
                ADD,
                *("crowd", home, str(FIRST_UID), *ACCOUNTS),
            )
            text = site.run(host, "cat", CONFIGURATION).stdout
            site.run(host, "cp", CONFIGURATION, f"{CONFIGURATION}.before")
            site.run(host, "tee", CONFIGURATION, data=enlarged(text))
            if host != "head":
                site.run(host, "cp", "--preserve", PROGRAM, f"{PROGRAM}.before")
                script = f'#!/bin/sh\nexec /usr/bin/python3 -I -S {STAND_IN} carme "$1"\n'
                site.run(host, "tee", PROGRAM, data=script)
        site.run("head", "sacctmgr", "--immediate", "add", "user", ",".join(ACCOUNTS), "account=carme")
        restart_slurm(site)
        yield
    finally:
        disperse(site)


def disperse(site: DemoSite) -> None:
    """Undo all of it, also what an earlier run left when it was cut short."""
    known = site.run("head", "id", ACCOUNTS[0], check=False).returncode == 0
    if known:
        cancel_jobs(site)
        # Before the nodes shrink: they could not hold the jobs that still run.
        wait_until("the crowd's jobs are over", lambda: not jobs(site), timeout=180)
    changed = False
    for host in hosts(site):
        for file in (CONFIGURATION, PROGRAM):
            if site.run(host, "test", "-e", f"{file}.before", check=False).returncode == 0:
                site.run(host, "mv", "--force", f"{file}.before", file)
                changed = True
    if changed:
        restart_slurm(site)
    if known:
        site.run("head", "sacctmgr", "--immediate", "delete", "user", ",".join(ACCOUNTS), check=False)
    for host in hosts(site):
        remove = "--remove" if host == "head" else ""
        script = f'for name; do userdel {remove} "$name" 2>/dev/null; done'
        site.run(host, "sh", "-c", script, "crowd", *ACCOUNTS, check=False)
    site.run("head", "rm", "-rf", FOLDER)


def enlarged(text: str) -> str:
    """slurm.conf with large nodes and patient daemons."""
    for name, value in PATIENT.items():
        text = re.sub(rf"(?m)^{name}=.*$", f"{name}={value}", text)
    for name, value in LARGE.items():
        text = re.sub(rf"(?m)^(NodeName=.*\b{name}=)\d+", rf"\g<1>{value}", text)
    return text


def restart_slurm(site: DemoSite) -> None:
    """Let all daemons read their configuration, and wait until the nodes take jobs."""
    site.run("head", "systemctl", "restart", "slurmctld")
    for host in hosts(site):
        if host != "head":
            site.run(host, "systemctl", "restart", "slurmd")

    def idle() -> bool:
        states = site.run("head", "sinfo", "--noheader", "--Node", "--format=%T", check=False).stdout.split()
        return bool(states) and all(state in ("idle", "mixed") for state in states)

    wait_until("all nodes take jobs", idle, timeout=90)


def cancel_jobs(site: DemoSite) -> None:
    """End the crowd's jobs, some at a time: hundreds at once would keep the machine busy for minutes."""
    names = iter(ACCOUNTS)
    while jobs(site) and (some := list(itertools.islice(names, 5))):
        # scancel takes one account at a time.
        site.run("head", "sh", "-c", 'for name; do scancel --user="$name"; done', "crowd", *some, check=False)
        wait_until("some jobs of the crowd are over", lambda some=some: not jobs(site, some), timeout=180)


def jobs(site: DemoSite, accounts: Iterable[str] = ACCOUNTS) -> int:
    """How many jobs these accounts have in the queue."""
    users = ",".join(accounts)
    return len(site.run("head", "squeue", "--noheader", f"--user={users}", "--format=%A").stdout.split())


def hosts(site: DemoSite) -> list[str]:
    """All machines of the demo, the head first."""
    return [machine.name for machine in site.settings.machines()]
