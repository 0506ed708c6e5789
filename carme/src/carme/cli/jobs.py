"""`carme jobs`, `carme cancel`, `carme extend`, `carme logs`."""

import argparse
import sys
import time

from carme.api import JobOut
from carme.broker import BrokerClient
from carme.cli import portal
from carme.cli.output import listed, moment, plain, print_json, printed, short
from carme.command_line import add_json
from carme.jobs import Job, arrays, minutes_text, parse_minutes
from carme.translation import translated

FOLLOW_SECONDS = 1.0
LOG_BYTES = 1 << 20  # that are requested at once
MOST_LINES = 1_000_000
TITLES = ["JOB", "NAME", "STATE", "NODES", "GPUS", "LIMIT", "STARTED", "EXPLANATION"]


_WHICH = "job number; 123_4 is task 4 of array 123"


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands."""
    jobs = commands.add_parser("jobs", help="list your jobs")
    which = jobs.add_mutually_exclusive_group()
    which.add_argument("--all-states", action="store_true", help="include jobs that ended minutes ago")
    which.add_argument(
        "--history", action="store_true", help="jobs of the last seven days, from the accounting"
    )
    add_json(jobs)
    jobs.set_defaults(run=_jobs)

    cancel = commands.add_parser("cancel", help="end jobs")
    cancel.add_argument("job", type=_which, nargs="+", metavar="JOBID", help=_WHICH)
    add_json(cancel)
    cancel.set_defaults(run=_cancel)

    extend = commands.add_parser("extend", help="give a running job more time")
    extend.add_argument("job", type=_which, metavar="JOBID", help=_WHICH)
    extend.add_argument("minutes", metavar="TIME", help="how much longer: 30 (minutes), 45m, 2h")
    add_json(extend)
    extend.set_defaults(run=_extend)

    logs = commands.add_parser("logs", help="print what a job has written")
    logs.add_argument("job", type=_which, metavar="JOBID", help=_WHICH)
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    logs.add_argument(
        "-n",
        "--tail",
        type=_lines,
        metavar="N",
        help="begin with the last N lines that are there (default: with all)",
    )
    add_json(logs)
    logs.set_defaults(run=_logs)


def _which(text: str) -> tuple[int, int | None]:
    try:
        return arrays.read_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _lines(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > MOST_LINES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid number of lines from 0 to {MOST_LINES}")
    return int(text)


def _jobs(options: argparse.Namespace) -> int:
    if portal.is_remote():
        return _remote_jobs(options)
    client = BrokerClient()
    jobs = client.history() if options.history else client.jobs(active=not options.all_states)
    none = "You have no jobs there." if options.history else "You have no jobs at the moment."
    return listed(options, jobs, TITLES, _row, f"{none}\nStart one with: carme submit -- COMMAND")


def _remote_jobs(options: argparse.Namespace) -> int:
    """Through the portal; `--history` is then of all years."""
    states = [None] if options.history or options.all_states else ["pending", "running"]
    limit = 50 if options.all_states else None
    with portal.client() as site:
        found = [job.info() for state in states for job in site.jobs.list(state=state, limit=limit)]
    return listed(options, found, TITLES, _row, "You have no jobs there.")


def _row(job: Job | JobOut) -> list[object]:
    limit = minutes_text(job.minutes_limit) if job.minutes_limit else "-"
    where = job.node_list or job.nodes
    return [
        _name(job),
        short(job.name),
        job.state.lower(),
        where,
        job.gpus,
        limit,
        moment(job.started),
        translated(job.explanation),
    ]


def _name(job: Job | JobOut) -> str:
    if job.array_id is None:
        return str(job.id)
    return arrays.task_name(job.array_id, job.tasks if job.task is None else job.task)


def _cancel(options: argparse.Namespace) -> int:
    cancelled = []
    for job_id, task in options.job:
        if portal.is_remote():
            job = portal.cancel_job(job_id, task)
        else:
            client = BrokerClient()
            job = client.job(job_id, task=task)
            client.cancel(job_id, task=task)
        name = str(job_id) if task is None else arrays.task_name(job_id, task)
        cancelled.append(job_id if task is None else name)
        if not options.json:
            print(f"Job {name} is being ended. {_follows(job, name, task)}")
    if options.json:
        print_json({"cancelled": cancelled})
    return 0


def _follows(job: Job | JobOut, name: str, task: int | None) -> str:
    """What there is to see of a job that was cancelled."""
    if job.array_id is not None and task is None:
        return f"See what one of its tasks wrote with: carme logs {job.array_id}_TASK"
    if job.started is None:
        return "It had not begun, so it has written nothing."
    return f"See what it wrote with: carme logs {name}"


def _extend(options: argparse.Namespace) -> int:
    (job_id, task), minutes = options.job, parse_minutes(options.minutes)
    if portal.is_remote():
        with portal.client() as site:
            given = site.jobs.get(job_id, task).extend(minutes)
    else:
        client = BrokerClient()
        given = client.extend(job_id if task is None else client.job(job_id, task=task).id, minutes)
    return printed(options, given, f"The job now ends at {moment(given.ends)}.")


def _logs(options: argparse.Namespace) -> int:
    if portal.is_remote():
        return _remote_logs(options)
    client = BrokerClient()
    (job_id, task), offset, tail = options.job, 0, options.tail
    while True:
        # The state before the text: a job that is over by now has written all it will.
        over = not options.follow or client.job(job_id, task=task).is_over
        while True:
            part = client.log(job_id, offset=offset, limit=LOG_BYTES, task=task, tail=tail)
            offset, tail = part.offset, None
            if not part.text:
                break
            if options.json:
                print_json(part)
            else:
                sys.stdout.write(part.text)
                sys.stdout.flush()
        if over:
            break
        time.sleep(FOLLOW_SECONDS)
    if offset == 0:
        job = client.job(job_id, task=task)
        state = plain(translated(job.explanation)) or f"Its state is {job.state}."
        yet = "" if job.is_over else " yet"
        print(f"Job {_name(job)} has written nothing{yet}. {state}", file=sys.stderr)
    return 0


def _remote_logs(options: argparse.Namespace) -> int:
    with portal.client() as site:
        for text in site.jobs.get(*options.job).logs(follow=options.follow, tail=options.tail):
            if options.json:
                print_json({"text": text})
            else:
                sys.stdout.write(text)
                sys.stdout.flush()
    return 0
