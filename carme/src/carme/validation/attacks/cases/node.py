"""Attacks: the node."""

import time
from collections.abc import Callable
from typing import Any

from carme.broker import BrokerClient
from carme.jobs import Job, JobRequest
from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.case import JOB_SECONDS, Area, add, on_node
from carme.validation.attacks.fixture import Fixture, Player

AREA = Area("The node")

on_node(
    AREA,
    "/tmp",
    "reads a file of the victim's in /tmp",
    "find_text",
    lambda s: {"path": "/tmp/carme-two-users", "text": s.secret},
)
on_node(
    AREA,
    "/dev/shm",
    "reads a file of the victim's in /dev/shm",
    "find_text",
    lambda s: {"path": "/dev/shm/carme-two-users", "text": s.secret},
)
on_node(
    AREA,
    "/tmp by /proc",
    "reads the victim's /tmp by way of the server's /proc/PID/root",
    "enter",
    lambda s: {"path": f"/proc/{s.server_pid}/root/tmp"},
)
add(
    AREA,
    "/tmp by its true place",
    "looks for the victim's /tmp where Slurm keeps it",
    lambda s: s.attacker_node.run("enter", path=f"/var/lib/slurm/job-tmp/{s.job_id}"),
    lambda s: s.victim_node.run("enter", path="/tmp"),
)
on_node(
    AREA,
    "GPUs",
    "opens the GPUs of the victim's job",
    "devices",
    lambda s: {"paths": s.victims_gpus},
    needs_gpus=True,
)
on_node(
    AREA,
    "processes",
    "looks at the command lines of the victim's processes",
    "processes_of",
    lambda s: {"user": s.victim.name},
)
on_node(
    AREA, "signals", "sends signals to the victim's server", "send_signal", lambda s: {"pid": s.server_pid}
)
add(
    AREA,
    "debugger",
    "attaches to the victim's server as a debugger does",
    lambda s: s.attacker_node.run("trace", pid=s.server_pid),
    # Attaching stops a server for a moment, and some sites forbid it for all but one's children.
    lambda s: s.attacker_node.run("own_child_traced"),
)
on_node(AREA, "memory", "opens the memory of the victim's server", "memory", lambda s: {"pid": s.server_pid})
for name, what, command in (
    (
        "step in the job",
        "runs a program inside the victim's job",
        ["srun", "--jobid=JOB", "--overlap", "--ntasks=1", "id"],
    ),
    (
        "change the job",
        "changes the job's time limit by Slurm",
        ["scontrol", "update", "JobId=JOB", "TimeLimit=-1"],
    ),
):
    add(
        AREA,
        name,
        what,
        lambda s, c=command: s.attacker_head.run(
            "run", arguments=[w.replace("JOB", str(s.job_id)) for w in c], texts=[]
        ),
        lambda s, c=command: s.victim_head.run(
            "run", arguments=[w.replace("JOB", str(s.job_id)) for w in c], texts=[]
        ),
    )
add(
    AREA,
    "cancel by Slurm",
    "cancels the victim's job by scancel",
    # scancel says nothing and ends well when it may not: whether the job lives is what counts.
    lambda s: (
        s.attacker_head.run("run", arguments=["scancel", str(s.job_id)], texts=[])[1:] and not lives(s),
        "scancel was run; the job " + ("lives" if lives(s) else "is gone"),
    ),
    lambda s: cancelled(
        s, s.victim, lambda job: s.victim_head.run("run", arguments=["scancel", str(job)], texts=[])
    ),
)
for target in ("victim", "root"):
    add(
        AREA,
        f"sbatch as {target}",
        f"submits a job as {'the victim' if target == 'victim' else 'root'} with sbatch --uid",
        lambda s, target=target: s.attacker_head.run(
            "run",
            arguments=[
                "sbatch",
                f"--uid={s.victim.account.uid if target == 'victim' else 0}",
                "--test-only",
                "--chdir=/",
                "--wrap=true",
            ],
            texts=["to start at"],
        ),
        lambda s: s.attacker_head.run(
            "run", arguments=["sbatch", "--test-only", "--chdir=/", "--wrap=true"], texts=["to start at"]
        ),
    )


def lives(fixture: Fixture) -> bool:
    """Whether the victim's session runs on."""
    return BrokerClient(fixture.settings.broker.socket).job(fixture.job_id).is_active


def cancelled(fixture: Fixture, player: Player, cancel: Callable[[int], Outcome]) -> Outcome:
    """Whether a user can end a small job of their own in this way."""
    client = BrokerClient(fixture.settings.broker.socket)
    # It does not end by itself while it is waited for.
    job = client.submit(small_job(command=["sleep", "600"], minutes=10), user=player.name)
    message = cancel(job)[1]
    if wait_until_over(client, job):
        return True, f"a job of their own was cancelled; {message}"
    client.cancel(job)
    return False, message


def wait_until_over(client: BrokerClient, job_id: int) -> Job | None:
    """A small job once it is over; None if it is not after longer than a busy cluster takes."""
    end = time.monotonic() + JOB_SECONDS
    while not (job := client.job(job_id)).is_over:
        if time.monotonic() > end:
            return None
        time.sleep(0.2)
    return job


def small_job(**changes: Any) -> JobRequest:
    """A job that waits a minute."""
    values = {
        "name": "security check",
        "kind": "batch",
        "image": None,
        "command": ["sleep", "60"],
        "minutes": 1,
    }
    return JobRequest(**(values | changes))
