"""Slurm through its own programs, with output formats that are the same from 22.05 to 26.05."""

import asyncio
import contextlib
import functools
import hashlib
import re
import secrets
import shlex
import string
import sys
import sysconfig
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Unpack

from carme.bookings.models import ReservationSpec, Window
from carme.errors import CarmeError, SlurmError
from carme.jobs import (
    Cluster,
    Job,
    JobRequest,
    JobState,
    Licence,
    Reservation,
    Share,
    StartEstimate,
)
from carme.jobs.access import Association
from carme.jobs.limits import Limits
from carme.launch.spec import JobSpec
from carme.projects.models import ORGANISATION, ProjectAccount
from carme.slurm import parsing
from carme.slurm.account import UnixAccount
from carme.slurm.folder import job_folder, log_name, start_in_folder
from carme.slurm.gateway import MANY_JOBS, ExitStatus, Order, Outcome, ReservationChanges
from carme.slurm.label import Label
from carme.slurm.programs import Finished, run
from carme.slurm.queue_cache import QueueCache
from carme.slurm.refusals import refusal
from carme.slurm.tres import ALLOTTED_FIELDS, EXCLUSIVE
from carme.translation import message as _

# Times as seconds since 1970, whatever the host's zone.
_TIMES = {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC"}
# And all tasks of an array that wait, however long that makes the line.
_WHOLE = {"SLURM_BITSTR_LEN": "0"}
# What `scontrol show job` reports anew each time, although nothing has happened to the job.
_PASSING = re.compile(r" (?:RunTime|LastSchedEval)=\S+")
_ALPHABET = string.ascii_letters + string.digits
_MANAGE = ("sacctmgr", "--immediate", "--noheader", "--parsable2")
#: Jobs in an argument, for which Linux has 128 KiB. Where there are more, squeue prints all jobs, as it reads
#: them in any case, or they have what they lack at the next poll.
_MOST_NAMED = 1000
_ESTIMATE = re.compile(r"to start at (?P<start>\S+)(?: using .*? on nodes (?P<nodes>\S+))?")


class SlurmCommands:
    """The adapter to squeue, sacct, scontrol, sbatch and scancel.

    Args:
        python: The interpreter that runs the small program which submits as the user; every account must be
            able to execute it.
        cluster: The name that Slurm's database knows this cluster by; there may be others in it.
    """

    def __init__(self, python: str = sys.executable, cluster: str = "") -> None:
        self._python = python
        self._cluster = cluster
        self._exclusive = ""  # squeue's field for it, once it is known
        # Others see the arguments of programs, and name their jobs; so squeue gets this one elsewhere.
        self._separator = _separator()
        self._known = QueueCache(self._separator.encode())
        self._known_nodes: parsing.KnownNodes = {}

    @property
    def has_many_jobs(self) -> bool:
        return self._known.count > MANY_JOBS

    async def pulse(self) -> str:
        # What scontrol prints for a job is four times as long as what squeue prints.
        if self.has_many_jobs:
            return secrets.token_hex(8)
        # squeue asks the controller two questions each time, scontrol one. Its output is not read, as users'
        # words in it cannot be distinguished from Slurm's: all they can cause is another poll of the queue.
        output = await _ask("scontrol", "--oneliner", "show", "job")
        return hashlib.sha256(_PASSING.sub("", output).encode()).hexdigest()

    async def queue(self) -> list[Job]:
        which = ("squeue", "--states=all", "--noheader", "--noconvert")
        # What jobs have, the short form does not report. A suffix makes fields as long as they are.
        if not self._exclusive:
            # The oldest releases know no such option. Where no answer comes for another reason, as squeue
            # had no configuration yet, it is queried again: in newer releases the older field is NO for all.
            known = (await run("squeue", "--helpFormat")).output.decode(errors="replace").split()
            self._exclusive = next((field for field in EXCLUSIVE if field in known), "")
        exclusive = self._exclusive or "OverSubscribe"
        short_form, long_form = self._forms(exclusive)
        if self.has_many_jobs:  # then each takes a while
            has, short = await _read_both(which, long_form, short_form)
        else:
            has, short = [await _read(*which, **form) for form in (long_form, short_form)]
        many = max(self._known.count, short.count(b"\n")) > MANY_JOBS
        if many:  # others are answered meanwhile
            jobs = await asyncio.to_thread(self._known.queue, short, has, exclusive)
        else:
            jobs = self._known.queue(short, has, exclusive)
        # Jobs that were submitted between the two. The long form comes first all the same: else a job that
        # begins again would have its new number of restarts beside its old state.
        missing = self._known.unallotted
        if 0 < len(missing) <= _MOST_NAMED:
            output = await _read_named(which, long_form, missing)
            allot = functools.partial(self._known.allot, output, exclusive)
            jobs = await asyncio.to_thread(allot) if many else allot()
        return jobs

    def _forms(self, exclusive: str) -> tuple[dict[str, str], dict[str, str]]:
        """squeue's short and long form, as the variables of its environment that request them.

        Arguments are for everybody to read, and a separator that users know they can write into their jobs'
        names: records of other jobs would stand there. The environment is for this account and root alone.
        """
        separator = self._separator
        short = "".join(f"%{field}{separator}" for field in parsing.QUEUE_FIELDS)
        long = ",".join(f"{field}:{separator}" for field in (*ALLOTTED_FIELDS, exclusive))
        return {"SQUEUE_FORMAT": short}, {"SQUEUE_FORMAT2": long}

    async def exit_statuses(self, ids: Iterable[int]) -> dict[int, ExitStatus]:
        wanted = set(ids)
        question = ("squeue", "--states=all", "--noheader", *_named(wanted))
        done = await run(*question, "--Format=JobID:20,exit_code:20")
        # With a single id that Slurm has forgotten squeue fails; then nothing is known about it.
        found = parsing.exit_statuses(done.output.decode(errors="replace")) if done.code == 0 else {}
        return {job_id: status for job_id, status in found.items() if job_id in wanted}

    async def outcomes(self, jobs: Iterable[Job]) -> dict[int, Outcome]:
        jobs = list(jobs)
        which = ",".join(str(job.id) for job in jobs)
        found = parsing.outcomes(*await self._sacct(parsing.OUTCOME_FIELDS, f"--jobs={which}"))
        if failed := ",".join(str(job.id) for job in jobs if job.state is JobState.NODE_FAIL):
            with contextlib.suppress(CarmeError):  # older releases do not know which node it was
                output = await self._sacct(parsing.FAILED_NODE_FIELDS, f"--jobs={failed}")
                for job_id, name in parsing.failed_nodes(*output).items():
                    found[job_id] = found.get(job_id, Outcome())._replace(failed_node=name)
        return found

    async def visible_jobs(self, ids: Iterable[int], account: UnixAccount) -> set[int]:
        wanted = set(ids)
        question = ("squeue", "--states=all", "--noheader", *_named(wanted))
        done = await run(*question, "--Format=JobID:20", owner=account)
        words = done.output.decode(errors="replace").split() if done.code == 0 else []
        return {int(word) for word in words if word.isdecimal()} & wanted

    async def visible_partitions(self, account: UnixAccount) -> set[str]:
        done = await run("sinfo", "--noheader", "--format=%R", owner=account)
        return set(_succeeded("sinfo", done).split())

    async def reservations(self) -> list[Reservation]:
        return parsing.reservations(await _ask("scontrol", "--oneliner", "show", "reservation"))

    async def make_reservation(self, spec: ReservationSpec) -> None:
        # What the program calls "now" is later than the moment at which it was started.
        has_begun = spec.start <= datetime.now(UTC)
        await _ask(
            *["scontrol", "create", "reservation", f"ReservationName={spec.name}"],
            *[f"StartTime={'now' if has_begun else _moment(spec.start)}", f"EndTime={_moment(spec.end)}"],
            *[f"PartitionName={spec.partition}", f"Nodes={','.join(spec.node_names)}"],
            # Slurm would want both of a job, were both named.
            f"Accounts={','.join(spec.accounts)}" if spec.accounts else f"Users={','.join(spec.users)}",
            # Jobs that still wait for it at its end wait like all others then; else Slurm would hold them.
            "Flags=NO_HOLD_JOBS_AFTER",
        )

    async def make_maintenance(self, window: Window) -> None:
        has_begun = window.start <= datetime.now(UTC)
        await _ask(
            *["scontrol", "create", "reservation", f"ReservationName={window.name}"],
            *[f"StartTime={'now' if has_begun else _moment(window.start)}", f"EndTime={_moment(window.end)}"],
            *[f"Nodes={','.join(window.node_names)}", "Users=root", "Flags=MAINT,IGNORE_JOBS"],
        )

    async def change_reservation(self, name: str, **changes: Unpack[ReservationChanges]) -> None:
        start, end = changes.get("start"), changes.get("end")
        values = {
            "StartTime": start and _moment(start),
            "EndTime": end and _moment(end),
            "Nodes": ",".join(changes.get("node_names", ())),
            "Users": ",".join(changes.get("users", ())),
        }
        await _ask(
            *["scontrol", "update", f"ReservationName={name}"],
            *[f"{key}={value}" for key, value in values.items() if value],
        )

    async def delete_reservation(self, name: str) -> None:
        await _ask("scontrol", "delete", f"ReservationName={name}")

    async def leave_reservation(self, job_id: int) -> None:
        await _ask("scontrol", "update", f"JobId={job_id}", "ReservationName=")

    async def licences(self) -> list[Licence]:
        return parsing.licences(await _ask("scontrol", "--oneliner", "show", "licenses"))

    async def limits(self, users: Iterable[str]) -> list[Limits]:
        which = f"users={','.join(sorted(set(users)))}"
        output = await _ask("scontrol", "--oneliner", "show", "assoc_mgr", which, "flags=assoc,qos")
        return parsing.limits(output)

    async def add_features(self, node: str, features: Iterable[str]) -> None:
        # As it is now, not as it was at the last poll: nodes change their features themselves.
        shown = await _ask("scontrol", "--oneliner", "show", "node", node)
        present = parsing.node_features(shown)
        if new := [feature for feature in features if feature not in present]:
            both = ",".join([*present, *new])
            await _ask(
                *["scontrol", "update", f"NodeName={node}"],
                *[f"AvailableFeatures={both}", f"ActiveFeatures={both}"],
            )

    async def set_preference(self, job_id: int, features: str) -> None:
        await _ask("scontrol", "update", f"JobId={job_id}", f"Prefer={features}")

    async def drain_node(self, name: str, reason: str) -> None:
        await _ask("scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}")

    async def resume_node(self, name: str) -> None:
        await _ask("scontrol", "update", f"NodeName={name}", "State=RESUME")

    async def has_association(self, user: str) -> bool:
        where = [f"user={user}", f"cluster={self._cluster}"]
        return bool((await _ask(*_MANAGE, "show", "association", "where", *where, "format=account")).strip())

    async def associations(self, user: str) -> list[Association]:
        where = [f"name={user}", f"cluster={self._cluster}"]
        form = f"format={','.join(parsing.USER_FIELDS)}"
        return parsing.associations(
            await _ask(*_MANAGE, "show", "user", "withassoc", "where", *where, form), user
        )

    async def enforcement(self) -> list[str]:
        return parsing.enforcement(await _ask("scontrol", "show", "config"))

    async def project_accounts(self) -> dict[str, ProjectAccount]:
        accounts = await _ask(*_MANAGE, "show", "account", "format=account,organization")
        names = parsing.accounts_of(accounts, ORGANISATION)
        found: dict[str, ProjectAccount] = {}
        for begin in range(0, len(names), _MOST_NAMED):
            found |= await self._projects_of(names[begin : begin + _MOST_NAMED])
        return found

    async def _projects_of(self, accounts: list[str]) -> dict[str, ProjectAccount]:
        which = [f"account={','.join(accounts)}", f"cluster={self._cluster}"]
        form = f"format={','.join(parsing.ASSOCIATION_FIELDS)}"
        associations = await _ask(*_MANAGE, "show", "association", "where", *which, form)
        requested = [f"accounts={','.join(accounts)}", "flags=assoc"]
        use = await _ask("scontrol", "--oneliner", "show", "assoc_mgr", *requested)
        return parsing.project_accounts(associations, use)

    async def account_exists(self, account: str) -> bool:
        return bool((await _ask(*_MANAGE, "show", "account", "where", f"name={account}")).strip())

    async def make_account(self, account: str) -> None:
        what = [f"cluster={self._cluster}", f"description={account}", f"organization={ORGANISATION}"]
        await _ask(*_MANAGE, "add", "account", account, *what)

    async def limit_account(self, account: str, values: dict[str, str]) -> None:
        await _ask(
            *[*_MANAGE, "modify", "account", "where", f"name={account}", f"cluster={self._cluster}"],
            *["set", *(f"{key}={value}" for key, value in values.items())],
        )

    async def add_member(self, account: str, user: str, partition: str = "") -> None:
        where = [f"account={account}", f"cluster={self._cluster}"]
        await _ask(*_MANAGE, "add", "user", user, *where, *_partition_filter(partition))

    async def stop_member(self, account: str, user: str, *, stopped: bool) -> None:
        where = [f"name={user}", f"account={account}", f"cluster={self._cluster}"]
        most = 0 if stopped else -1
        await _ask(*_MANAGE, "modify", "user", "where", *where, "set", f"MaxSubmitJobs={most}")

    async def remove_member(self, account: str, user: str, partition: str = "") -> None:
        where = [f"name={user}", f"account={account}", f"cluster={self._cluster}"]
        await _ask(*_MANAGE, "delete", "user", "where", *where, *_partition_filter(partition))

    async def set_limit(self, job: str, minutes: int) -> None:
        await _ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    async def cluster(self) -> Cluster:
        nodes = await _ask("scontrol", "--details", "--oneliner", "show", "node")
        partitions = await _ask("scontrol", "--oneliner", "show", "partition")
        return parsing.cluster(nodes, partitions, self._known_nodes)

    async def history(
        self, user: str | None, since: datetime, limit: int, until: datetime | None = None
    ) -> list[Job]:
        jobs = await self._accounted_between(user, since, until)
        jobs.sort(key=lambda job: (job.submitted or since, job.id), reverse=True)
        return jobs[:limit]

    async def accounted(self, job_id: int, task: int | None = None) -> Job | None:
        jobs = await self._accounted_of([job_id])
        if task is None:
            return next((job for job in jobs if job.id == job_id), None)
        found = [job for job in jobs if job.has_task(job_id, task)]
        return next((job for job in found if job.task == task), found[0] if found else None)

    async def accounted_jobs(self, ids: Iterable[int]) -> dict[int, Job]:
        wanted = set(ids)
        found: dict[int, Job] = {}
        for job in await self._accounted_of(sorted(wanted)):
            if job.id in wanted:
                found.setdefault(job.id, job)
        return found

    async def admin_comments(self, ids: Iterable[int]) -> dict[int, str]:
        wanted = set(ids)
        which = f"--jobs={','.join(map(str, sorted(wanted)))}"
        output = await self._sacct(parsing.ADMIN_COMMENT_FIELDS, "--allocations", which)
        return {job: text for job, text in parsing.admin_comments(*output).items() if job in wanted}

    async def set_admin_comment(self, job_id: int, text: str) -> None:
        await _ask(
            *["sacctmgr", "--immediate", "--quiet", "modify", "job", "where", f"jobid={job_id}"],
            *["set", f"AdminComment={text}"],
        )

    async def coordinated_accounts(self, user: str) -> list[str]:
        form = "format=Account,Coordinators"
        output = await _ask(
            *[
                "sacctmgr",
                "--noheader",
                "--parsable2",
                "--readonly",
                "show",
                "account",
                "withcoordinator",
                form,
            ]
        )
        return parsing.coordinated_accounts(output, user)

    async def _accounted_between(
        self, user: str | None, since: datetime, until: datetime | None
    ) -> list[Job]:
        """Jobs of a user, or of all, that were there between two moments."""
        user_option = f"--user={user}" if user else "--allusers"
        end = _moment(until) if until else "now"
        return await self._accounting(user_option, f"--starttime={_moment(since)}", f"--endtime={end}")

    async def _accounted_of(self, ids: Iterable[int]) -> list[Job]:
        """Jobs, and the tasks of those that are arrays."""
        return await self._accounting(f"--jobs={','.join(map(str, ids))}")

    async def _accounting(self, *which: str) -> list[Job]:
        return parsing.accounting(*await self._sacct(parsing.ACCOUNTING_FIELDS, "--allocations", *which))

    async def _sacct(self, fields: Iterable[str], *which: str) -> tuple[str, str]:
        """sacct's output, and the separator in it."""
        separator = _separator()
        output = await _ask(
            *["sacct", "--noheader", "--noconvert", "--parsable"],
            *[f"--delimiter={separator}", f"--format={','.join(fields)}"],
            *which,
        )
        return output, separator

    async def submit(self, order: Order, owner: UnixAccount) -> int:
        places = _places(job_folder(owner, order.key), order.request.array)
        done = await start_in_folder(
            order, owner, self._python, ["sbatch", "--parsable", *_arguments(order), *places], job_script()
        )
        return _submitted(done)

    async def submit_again(self, job: Job, owner: UnixAccount, submission: int) -> int:
        order = order_of(job)
        arguments = [*_arguments(order), *_places(job_folder(owner, order.key))]
        return _submitted(
            await run("sbatch", "--parsable", *arguments, owner=owner, stdin=job_script(submission).encode())
        )

    async def close_lost(self) -> None:
        await _ask("sacctmgr", "--immediate", "show", "runawayjobs")

    async def estimate(self, order: Order, owner: UnixAccount) -> StartEstimate:
        done = await run(
            *["sbatch", "--test-only", *_arguments(order)],
            owner=owner,
            stdin=job_script().encode(),
            environment=_TIMES,
        )
        _succeeded("sbatch", done)
        message = " ".join(done.errors.removeprefix("sbatch: ").split())[:300]
        match = _ESTIMATE.search(message)
        if match is None:
            return StartEstimate(message=message)
        return StartEstimate(start=parsing.time(match["start"]), nodes=match["nodes"] or "", message=message)

    async def cancel(self, job: str, owner: UnixAccount) -> None:
        _succeeded("scancel", await run("scancel", job, owner=owner))


def _arguments(order: Order) -> list[str]:
    request = order.request
    gres = ":".join(filter(None, ["gpu", request.gpu_type, str(request.gpus_per_node)]))
    arguments = [
        "--no-requeue",  # a second start could make a second server
        # The clean environment that sbatch has here. What a user's login files set, a job without a
        # container finds all the same: `carme.launch.login` asks for it, as Slurm (with NONE) would wait for
        # minutes where they do not end, and start the job without HOME.
        "--export=ALL",
        f"--job-name={request.name}",
        f"--comment={Label(request.kind, request.image, order.key)}",
        f"--partition={order.partition}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={order.share.cpus}",
        f"--mem={order.share.memory_mb}M",
        f"--time={request.minutes}",
    ]
    if request.image and request.nodes > 1:
        # When a node fails the job knows how to go on (`carme.launch.other_nodes`), unless it is the first
        # one: then the broker ends it.
        arguments.append("--no-kill")
    if request.array:
        arguments.append(f"--array={request.array}")
    if order.account:
        arguments.append(f"--account={order.account}")
    if request.qos:
        arguments.append(f"--qos={request.qos}")
    if request.reservation:
        arguments.append(f"--reservation={request.reservation}")
    if request.gpus_per_node:
        arguments.append(f"--gres={gres}")
    if order.after is not None:
        arguments.append(f"--dependency=afterany:{order.after}")
    if order.node_names:
        arguments.append(f"--nodelist={','.join(order.node_names)}")
    if order.prefer:
        arguments.append(f"--prefer={order.prefer}")
    if order.constraint:
        arguments += [f"--constraint={order.constraint}", "--exclusive"]
    return arguments


def _places(folder: Path, array: str | None = None) -> list[str]:
    """Where the job runs and writes."""
    # sbatch replaces %j and the like in the names of output files; %a is the number of a task.
    log = f"{str(folder).replace('%', '%%')}/{log_name('%a' if array else None)}"
    return [f"--output={log}", f"--error={log}", "--open-mode=append", f"--chdir={folder}"]


def order_of(job: Job) -> Order:
    """The order that a job of ours came from, as far as sbatch needs it."""
    assert job.key is not None and job.kind != "other"
    nodes = max(1, job.nodes)
    return Order(
        key=job.key,
        request=JobRequest(
            name=job.name,
            kind=job.kind,
            image=job.image,
            command=["-"],  # its folder holds it
            nodes=nodes,
            gpus_per_node=job.gpus // nodes,
            gpu_type=job.gpu_type,
            minutes=job.minutes_limit or 1,
            qos=job.qos or None,
            reservation=job.reservation or None,
        ),
        partition=job.partition,
        account=job.account or None,
        share=Share(cpus=max(1, job.cpus // nodes), memory_mb=job.memory_mb // nodes),
        spec=JobSpec(),
    )


def _submitted(done: Finished) -> int:
    """The id that sbatch names."""
    output = _succeeded("sbatch", done)
    job_id = output.strip().splitlines()[-1].split(";")[0] if output.strip() else ""
    if not job_id.isdecimal():
        raise SlurmError(
            _("sbatch did not name a job; it wrote {output!r}.", output=output[:200]),
            _("Tell an administrator."),
        )
    return int(job_id)


def job_script(submission: int = 1) -> str:
    """The same for every job: the job's folder is its working directory.

    Args:
        submission: Which one it is; more than one where the controller has lost a job.
    """
    program = Path(sysconfig.get_path("scripts")) / "carme-job"
    which = f" --submission {submission}" if submission > 1 else ""
    # Isolated: nothing that a user or a site sets for Python reaches the launcher.
    return f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I {shlex.quote(str(program))}{which} "$PWD"\n'


def _moment(moment: datetime) -> str:
    """As scontrol reads it in the zone that `_TIMES` sets."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _partition_filter(partition: str) -> list[str]:
    return [f"partition={partition}"] if partition else []


def _separator() -> str:
    # 47 bits; it follows each field of each job, so its length counts.
    return "|" + "".join(secrets.choice(_ALPHABET) for _ in range(8))


def _named(ids: Collection[int]) -> list[str]:
    """The option of squeue for these jobs; none where they are too many, and all jobs are to be read."""
    return [f"--jobs={','.join(map(str, sorted(ids)))}"] if len(ids) <= _MOST_NAMED else []


async def _ask(*arguments: str) -> str:
    return (await _read(*arguments)).decode(errors="replace")


async def _read(*arguments: str, **variables: str) -> bytes:
    done = await run(*arguments, environment=_TIMES | _WHOLE | variables)
    _check(arguments[0], done)
    return done.output


async def _read_named(question: tuple[str, ...], form: dict[str, str], jobs: list[int]) -> bytes:
    """The same for some jobs alone; empty without an answer, as where Slurm has forgotten all of them.

    What the poll has found already counts without it.
    """
    with contextlib.suppress(SlurmError):
        done = await run(*question, f"--jobs={','.join(map(str, jobs))}", environment=_TIMES | _WHOLE | form)
        return done.output if done.code == 0 else b""
    return b""


async def _read_both(
    question: tuple[str, ...], first: dict[str, str], second: dict[str, str]
) -> tuple[bytes, bytes]:
    """A program's output in two forms, read at the same time; both have ended when this returns or raises."""
    reading = [asyncio.create_task(_read(*question, **form)) for form in (first, second)]
    try:
        return await reading[0], await reading[1]
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def _succeeded(program: str, done: Finished) -> str:
    _check(program, done)
    return done.output.decode(errors="replace")


def _check(program: str, done: Finished) -> None:
    if done.code != 0:
        raise refusal(program, done.errors or done.output.decode(errors="replace"))
