"""A job's private folder in its owner's home, which holds all that the job needs."""

import json
import marshal
import secrets
from pathlib import Path

from carme.errors import SlurmError
from carme.jobs import submission
from carme.jobs.certificate import make_certificate
from carme.slurm.account import UnixAccount
from carme.slurm.gateway import Order
from carme.slurm.programs import Finished, check_home, run
from carme.translation import message as _


def job_folder(owner: UnixAccount, key: str) -> Path:
    """A job's private folder in its owner's home."""
    return Path(owner.home) / ".local/share/carme/jobs" / key


def log_name(task: int | str | None) -> str:
    """The file in a job's folder that it, or this task of it, writes its output to."""
    return "output.log" if task is None else f"output-{task}.log"


async def start_in_folder(
    order: Order, owner: UnixAccount, python: str, arguments: list[str], script: str
) -> Finished:
    """Make the job's folder as its owner, then run a program that submits it; the folder goes if that fails.

    Args:
        order: What is submitted.
        owner: Whose home it is, and as whom everything runs.
        python: The interpreter, which the owner must be able to execute.
        arguments: The program and its arguments.
        script: What it gets as standard input.

    Raises:
        SlurmError: The folder cannot be made.
    """
    check_home(owner)
    request = order.request
    message = {
        "folder": str(job_folder(owner, order.key)),
        "arguments": arguments,
        "script": script,
        "files": {
            "spec.json": json.dumps(order.spec.dump()),
            "environment.json": json.dumps(request.environment),
            "fabric.key": secrets.token_hex(32),
            "fabric.pem": make_certificate(),
            **({"request.json": request.model_dump_json()} if request.kind == "batch" else {}),
            **{f"files/{name}": text for name, text in request.files.items()},
        },
    }
    done = await run(
        *[python, "-I", "-S", str(submission.__file__)],
        owner=owner,
        stdin=marshal.dumps(message, 4),  # every Python reads this version
    )
    if done.code == submission.NO_FOLDER:
        raise SlurmError(
            _("The job's folder cannot be made: {errors}.", errors=done.errors.strip()[:300]),
            _("Check that your home directory exists, is writable and has space left."),
            code="home",
        )
    return done
