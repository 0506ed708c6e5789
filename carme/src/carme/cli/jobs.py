"""`carme jobs`, `carme cancel`, `carme logs`."""

import argparse
import sys
import time

from carme.api import JobOut
from carme.broker import BrokerClient
from carme.cli import portal
from carme.cli.output import add_json, moment, plain, print_json, print_table
from carme.jobs import Job, minutes_text

FOLLOW_SECONDS = 1.0
TITLES = ["JOB", "NAME", "STATE", "NODES", "GPUS", "LIMIT", "STARTED", "EXPLANATION"]


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands."""
    jobs = commands.add_parser("jobs", help="list your jobs")
    which = jobs.add_mutually_exclusive_group()
    which.add_argument("--all-states", action="store_true", help="also those that ended minutes ago")
    which.add_argument(
        "--history", action="store_true", help="those of the last seven days, from the accounting"
    )
    add_json(jobs)
    jobs.set_defaults(run=_jobs)

    cancel = commands.add_parser("cancel", help="end jobs")
    cancel.add_argument("job", type=int, nargs="+", metavar="JOBID")
    add_json(cancel)
    cancel.set_defaults(run=_cancel)

    logs = commands.add_parser("logs", help="print what a job has written")
    logs.add_argument("job", type=int, metavar="JOBID")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    add_json(logs)
    logs.set_defaults(run=_logs)


def _jobs(options: argparse.Namespace) -> int:
    if portal.is_remote():
        return _remote_jobs(options)
    client = BrokerClient()
    jobs = client.history() if options.history else client.jobs(active=not options.all_states)
    if options.json:
        print_json(jobs)
        return 0
    if not jobs:
        print("You have no jobs there." if options.history else "You have no jobs at the moment.")
        print("Start one with: carme submit -- COMMAND")
        return 0
    print_table(TITLES, [_row(job) for job in jobs])
    return 0


def _remote_jobs(options: argparse.Namespace) -> int:
    """Through the portal; `--history` is then of all years."""
    states = [None] if options.history or options.all_states else ["pending", "running"]
    limit = 50 if options.all_states else None
    with portal.client() as site:
        found = [job.info() for state in states for job in site.jobs.list(state=state, limit=limit)]
    if options.json:
        print_json(found)
    elif not found:
        print("You have no jobs there.")
    else:
        print_table(TITLES, [_row(job) for job in found])
    return 0


def _row(job: Job | JobOut) -> list[object]:
    limit = minutes_text(job.minutes_limit) if job.minutes_limit else "-"
    where = job.node_list or job.nodes
    return [job.id, job.name, job.state.lower(), where, job.gpus, limit, moment(job.started), job.explanation]


def _cancel(options: argparse.Namespace) -> int:
    cancel = portal.cancel_job if portal.is_remote() else BrokerClient().cancel
    for job_id in options.job:
        cancel(job_id)
        if not options.json:
            print(f"Job {job_id} is being ended. See what it wrote with: carme logs {job_id}")
    if options.json:
        print_json({"cancelled": options.job})
    return 0


def _logs(options: argparse.Namespace) -> int:
    if portal.is_remote():
        return _remote_logs(options)
    client = BrokerClient()
    offset = 0
    while True:
        # The state before the text: a job that is over by now has written all it will.
        over = not options.follow or client.job(options.job).is_over
        while (part := client.log(options.job, offset=offset)).text:
            offset = part.offset
            if options.json:
                print_json(part)
            else:
                sys.stdout.write(part.text)
                sys.stdout.flush()
        if over:
            break
        time.sleep(FOLLOW_SECONDS)
    if offset == 0:
        job = client.job(options.job)
        state = plain(job.explanation) or f"Its state is {job.state}."
        print(f"Job {job.id} has written nothing yet. {state}", file=sys.stderr)
    return 0


def _remote_logs(options: argparse.Namespace) -> int:
    with portal.client() as site:
        for text in site.jobs.get(options.job).logs(follow=options.follow):
            if options.json:
                print_json({"text": text})
            else:
                sys.stdout.write(text)
                sys.stdout.flush()
    return 0
