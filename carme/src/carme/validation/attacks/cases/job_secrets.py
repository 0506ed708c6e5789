"""Attacks: the job's secrets."""

from carme.errors import CarmeError
from carme.validation.attacks.case import Area, add, on_head, on_node
from carme.validation.attacks.fixture import Fixture

AREA = Area("The job's secrets")

for file in (
    "environment.json",
    "spec.json",
    "fabric.key",
    "fabric.pem",
    "files/singleuser.key",
    "output.log",
):
    on_node(
        AREA,
        f"file {file}",
        f"reads {file} of the job's private folder",
        "read",
        lambda s, file=file: {"path": f"{s.victim.folder}/{file}"},
    )
on_head(
    AREA,
    "private folder",
    "lists the job's private folder on the head",
    "enter",
    lambda s: {"path": s.victim.folder},
)
on_head(
    AREA,
    "folder of jobs",
    "lists the folder that holds the victim's job folders",
    "enter",
    lambda s: {"path": s.victim.folder.rpartition("/")[0]},
)
on_node(
    AREA,
    "environ",
    "reads the server's environment in /proc",
    "read",
    lambda s: {"path": f"/proc/{s.server_pid}/environ"},
)
on_node(
    AREA,
    "descriptors",
    "lists the server's open files in /proc",
    "enter",
    lambda s: {"path": f"/proc/{s.server_pid}/fd"},
)
add(
    AREA,
    "secrets in arguments",
    "looks for the victim's token, key and session's title in all command lines of the node",
    lambda s: s.attacker_node.run("arguments_with", user=s.victim.name, texts=secrets_of(s)),
    # The victim finds in command lines what is not secret: so looking works.
    lambda s: s.victim_node.run("arguments_with", user=s.victim.name, texts=["singleuser", s.victim.folder]),
)
for program, arguments in {
    "scontrol show job": ["scontrol", "--details", "--details", "show", "job"],
    "squeue": ["squeue", "--all", "--noheader", "--format=%A %j %k %Z %o"],
    "sacct": [
        "sacct",
        "--allusers",
        "--allocations",
        "--noheader",
        "--parsable2",
        "--format=JobIDRaw,JobName,WorkDir",
    ],
    "sstat": ["sstat", "--allsteps", "--noheader", "--format=JobID", "--jobs"],
}.items():
    on_head(
        AREA,
        program,
        f"looks for the victim's job with {program}",
        "run",
        lambda s, program=program, arguments=arguments: {
            "arguments": [*arguments, *([str(s.job_id)] if program == "sstat" else [])],
            "texts": [f"session-{s.victim.session}"] if program != "sstat" else [f"{s.job_id}."],
        },
    )
on_head(
    AREA,
    "batch script",
    "asks Slurm for the job's script",
    "run",
    lambda s: {
        "arguments": ["scontrol", "write", "batch_script", str(s.job_id), "-"],
        "texts": ["carme-job"],
    },
)
add(
    AREA,
    "secrets in Slurm",
    "looks for the victim's token, key and title in all that Slurm says about the job, even to its owner",
    lambda s: s.victim_head.run(
        "run",
        arguments=["sh", "-c", f"scontrol -dd show job {s.job_id}; scontrol write batch_script {s.job_id} -"],
        texts=secrets_of(s),
    ),
    lambda s: s.victim_head.run(
        "run", arguments=["scontrol", "show", "job", str(s.job_id)], texts=[f"session-{s.victim.session}"]
    ),
)
add(
    AREA,
    "secrets in logs",
    "looks for the victim's token and key in the job's log, even as its owner",
    lambda s: s.victim_head.run(
        "run", arguments=["cat", f"{s.victim.folder}/output.log"], texts=secrets_of(s)
    ),
    lambda s: s.victim_head.run("run", arguments=["cat", f"{s.victim.folder}/output.log"], texts=["http"]),
)


def secrets_of(fixture: Fixture) -> list[str]:
    """What nobody but the victim may read anywhere."""
    key = fixture.victim_node.ask("text_of", path=f"{fixture.victim.folder}/fabric.key").strip()
    secrets = [fixture.victim.token, key]
    if not all(secrets):
        raise CarmeError("The victim's session has no token or no key, so whether they leak cannot be tried.")
    return secrets
