"""The program `carme-job KEYFOLDER`: what a job does on its compute nodes.

It runs on the first node, starts the command there (in the job's container, under the node agent) and, in
a job of several nodes, joining agents on the others. Whatever fails is one sentence in the job's log.

A session's user waits for what happens here. So it imports little: no asyncio, no subprocess, no pathlib.
"""

import os
import socket
import sys
from typing import Any

from carme.errors import CarmeError
from carme.launch import facts, login
from carme.launch.container import DATA_VARIABLES, container, forwarded, own_place, unlink, variables
from carme.launch.exits import Exit, LaunchError
from carme.launch.other_nodes import HOSTS, WATCH_SECONDS, keep_other_agents, step
from carme.launch.preparation import (
    Allocation,
    address_of,
    as_task,
    begin,
    check_home,
    credentials,
    home,
    make_private,
    of_task,
    read_json,
    read_spec,
    remove_private,
)
from carme.launch.programs import Programs, log, without_export
from carme.launch.spec import JobSpec

#: This program once more, isolated from what the job's environment sets for Python.
ITSELF = [
    *[sys.executable, "-I", "-c"],
    "import sys; sys.path.append(sys.argv.pop(1)); from carme.launch.job import main; sys.exit(main())",
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
]
USAGE = "Usage: carme-job [--join HOST:PORT | --submission N] KEYFOLDER. Slurm starts it, in a job of Carme."


def main(arguments: list[str] | None = None) -> int:
    """Run the job; its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    where, submission = "", "1"
    if len(words) == 3 and words[0] == "--join":
        where = words[1]
        words = words[2:]
    elif len(words) == 3 and words[0] == "--submission":
        submission = words[1]
        words = words[2:]
    if len(words) != 1 or words[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        return _join(words[0], where) if where else _run(words[0], submission)
    except CarmeError as error:
        log(str(error))
        return error.exit_code if isinstance(error, LaunchError) else Exit.FAILED


def _run(folder: str, submission: str) -> int:
    allocation = Allocation()
    os.environ.update(login.identity(os.environ))
    spec = read_spec(folder)
    check_home(home())
    if spec.array:
        folder, spec = as_task(folder, spec, os.environ.get("SLURM_ARRAY_TASK_ID", ""))
    begin(folder, submission)
    programs = Programs()
    logged_in = _logged_in(spec)
    facts.write(folder, spec.image_name, spec.digest, spec.workdir, logged_in.note)
    if spec.image is None and not spec.wants_data:
        return _directly(programs, folder, spec, logged_in.environment)
    make_private(allocation.private)
    staged = None
    try:
        os.chdir("/")
        staged = data(spec, folder, allocation)
        if not spec.command:
            return _stage_on_other_nodes(programs, folder, spec, allocation)
        if spec.image is None:
            return _directly(programs, folder, spec, logged_in.environment)
        agent = [
            *["carme-agent", "--nodes", str(allocation.nodes)],
            *credentials(folder),
            *["--announce", f"{allocation.private}/fabric.json"],
            *["--announce", f"{folder}/fabric.json"],
            *["--listen", address_of(allocation.node)],
            *["--environment-file", f"{folder}/environment.json"],
            *["--", *spec.command],
        ]
        first = programs.start([*container(spec, staged), *agent], forwarded(folder, spec))
        if allocation.nodes > 1:
            keep_other_agents(
                programs, first, spec, allocation, lambda where: [*ITSELF, "--join", where, folder]
            )
        return programs.wait(first)
    finally:
        remove_private(allocation.private, staged)
        if spec.own_image:
            unlink(own_place(spec))


def _join(folder: str, where: str) -> int:
    """What a node other than the first does."""
    allocation = Allocation()
    os.environ.update(login.identity(os.environ))
    spec = read_spec(folder)
    if spec.array:
        spec = of_task(spec, folder)
    programs = Programs()
    make_private(allocation.private)
    staged = None
    try:
        os.chdir("/")
        staged = data(spec, folder, allocation)
        if not spec.command:
            return 0
        command = ["carme-agent", *credentials(folder), "--join", where]
        agent = programs.start([*container(spec, staged), *command], forwarded(folder, spec))
        joined = False
        while not joined and not programs.has_ended(agent):
            programs.wait_for_any(WATCH_SECONDS)
            joined = os.path.exists(f"{allocation.private}/{HOSTS}")
        code = programs.wait(agent)
        # A step ends on all its nodes when it fails on one. Who had joined is lost alone.
        return 0 if joined else code
    finally:
        remove_private(allocation.private, staged)
        if spec.own_image:
            unlink(own_place(spec))


def _stage_on_other_nodes(programs: Programs, folder: str, spec: JobSpec, allocation: Allocation) -> int:
    """In a job that only brings the data of another one: the same on its other nodes."""
    if allocation.nodes == 1:
        return 0
    program = [*ITSELF, "--join", "-:0", folder]
    return programs.wait(
        programs.start([*step(spec, allocation.nodes), *program], without_export(os.environ))
    )


def data(spec: JobSpec, folder: str, allocation: Allocation) -> Any:
    """Bring the job's data to this node; what is there then, None when nothing was requested."""
    if not spec.wants_data:
        return None
    from carme.launch.staging import stage

    staged = stage(spec, folder, allocation.job_id, allocation.nodes, allocation.private)
    os.environ.update(staged.environment)
    return staged


def _logged_in(spec: JobSpec) -> login.Login:
    """What the owner's login files set for a command that runs without an image; logged if they fail."""
    if spec.image is not None or not spec.command:
        return login.Login(dict(os.environ))  # a container sees nothing of what they set
    found = login.log_in(os.environ)
    if found.note:
        log("\n".join(filter(None, [found.note, found.errors])))
    return found


def _directly(programs: Programs, folder: str, spec: JobSpec, logged_in: dict[str, str]) -> int:
    data = {name: os.environ[name] for name in DATA_VARIABLES if name in os.environ}
    given = variables(folder, spec) | data
    environment = logged_in | given | read_json(f"{folder}/environment.json", dict[str, str])
    workdir = spec.workdir or home()
    try:
        os.chdir(workdir)
    except OSError as error:
        raise LaunchError(
            Exit.NO_WORKDIR,
            f"The folder {workdir} cannot be entered on {socket.gethostname()}: {error.strerror}.",
            "Choose another working directory.",
        ) from None
    return programs.wait(programs.start([*spec.command], without_export(environment)))


if __name__ == "__main__":
    sys.exit(main())
