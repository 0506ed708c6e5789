"""The `#SBATCH` lines of a script: what they ask for in words of `carme submit`, and what is ignored."""

import argparse
import math
import re
import shlex
from typing import Any, NamedTuple, NoReturn

from carme.errors import InvalidRequest
from carme.jobs.times import parse_minutes
from carme.translation import message as _

__all__ = ["Directives", "directives"]

_MEMORY = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
#: Of a number. Nobody asks for more.
_MOST_DIGITS = 12
#: By the names of `carme submit`'s options; what is combined from several is added below.
_SAME = ("name", "partition", "account", "qos", "reservation", "array", "workdir", "gpu_type")
#: They ask for what is so anyway.
_NEEDLESS = ("--export", "--get-user-env", "--no-requeue", "--parsable", "--quiet", "-Q", "--verbose", "-v")
#: What stands between the components of a heterogeneous job; the second word is that of old Slurms.
_PARTS = (["hetjob"], ["packjob"])


class Directives(NamedTuple):
    """The requested options, by the names of the options of `carme submit`, and the ignored ones."""

    options: dict[str, Any]
    ignored: list[str]


class _Refused(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


def directives(text: str) -> Directives:
    """Read the `#SBATCH` lines of a script, which stand before its first command, as Slurm does (sbatch(1)).

    Raises:
        InvalidRequest: One of them cannot be understood, or begins another component of a heterogeneous job;
            with its line.
    """
    found, ignored = argparse.Namespace(), []
    parser = _parser()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            break
        match = re.match(r"#SBATCH\s+(.*)", line)
        if match is None:
            continue
        if match[1].split()[:1] in _PARTS:
            raise InvalidRequest(
                _(
                    "Line {number} of the script, {line!r}, begins another component of a "
                    "heterogeneous job, and Carme submits jobs whose nodes are alike.",
                    number=number,
                    line=line.strip()[:80],
                ),
                _("Submit it with sbatch; carme jobs and the portal show its components."),
                field="script",
            )
        try:
            _unused, unread = parser.parse_known_args(shlex.split(match[1], comments=True), found)
            _combined(found)
        except (_Refused, ValueError, OverflowError, InvalidRequest) as error:
            why = error.message if isinstance(error, InvalidRequest) else f"{str(error).rstrip('.')}."
            raise InvalidRequest(
                _(
                    "Line {number} of the script, {line!r}, cannot be understood: {why}",
                    number=number,
                    line=line.strip()[:80],
                    why=why,
                ),
                _("Correct it, or take it out and give the option to carme submit."),
                field="script",
            ) from None
        # What is not UTF-8 can be named on no page.
        words = [word.encode(errors="replace").decode() for word in unread if word.startswith("-")]
        ignored += [word.partition("=")[0] for word in words]
    requested = _combined(found)
    ignored = [word for word in dict.fromkeys(ignored) if word not in _NEEDLESS]
    for name, what in (("memory", "--mem=0"), ("time", "--time without a limit")):
        if vars(found).get(name) == 0:
            ignored.append(what)
    return Directives(requested, ignored)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="#SBATCH", add_help=False, argument_default=argparse.SUPPRESS)
    for flags, name, kind in (
        (("-J", "--job-name"), "name", _name),
        (("-p", "--partition"), "partition", str),
        (("-A", "--account"), "account", str),
        (("-q", "--qos"), "qos", str),
        (("--reservation",), "reservation", str),
        (("-a", "--array"), "array", str),
        (("-D", "--chdir"), "workdir", str),
        (("-t", "--time"), "time", _minutes),
        (("-N", "--nodes"), "nodes", _smallest),
        (("-n", "--ntasks"), "tasks", _count),
        (("--ntasks-per-node",), "tasks_per_node", _count),
        (("-c", "--cpus-per-task"), "cpus_per_task", _count),
        (("--mem",), "memory", _memory),
        (("--mem-per-cpu",), "memory_per_cpu", _memory),
        (("-G", "--gpus"), "gpus_in_all", _gpus),
        (("--gpus-per-node",), "gpus_per_node", _gpus),
        (("--gpus-per-task",), "gpus_per_task", _gpus),
        (("--gres",), "gpus_per_node", _gres),
    ):
        parser.add_argument(*flags, dest=name, type=kind)
    return parser


def _combined(found: argparse.Namespace) -> dict[str, Any]:
    """What the options ask for of each node."""
    given = vars(found)
    requested = {name: given[name] for name in _SAME if name in given}
    nodes = given.get("nodes", 1)
    if "nodes" in given:
        requested["nodes"] = nodes
    if given.get("time"):
        requested["time"] = str(given["time"])
    tasks = given.get("tasks_per_node", math.ceil(given.get("tasks", nodes) / nodes))
    if {"tasks", "tasks_per_node", "cpus_per_task"} & given.keys():
        requested["cpus"] = tasks * given.get("cpus_per_task", 1)
    if given.get("memory"):
        requested["memory"] = given["memory"]
    elif given.get("memory_per_cpu"):
        requested["memory"] = given["memory_per_cpu"] * requested.get("cpus", 1)
    for name, times, parts in (
        ("gpus_in_all", 1, nodes), ("gpus_per_task", tasks, 1), ("gpus_per_node", 1, 1),
    ):  # fmt: skip
        if given.get(name):
            kind, count = given[name]
            requested["gpus"] = math.ceil(count * times / parts)
            if kind:
                requested["gpu_type"] = kind
    return requested


def _name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._ -]", "-", text)[:64] or "job"


def _count(text: str) -> int:
    """A number that no sum of options makes too large to be written down."""
    if len(text) > _MOST_DIGITS:
        raise ValueError
    return int(text)


def _smallest(text: str) -> int:
    """The smallest of `2` or `2-4`."""
    count = _count(text.partition("-")[0])
    if count < 1:
        raise ValueError
    return count


def _minutes(text: str) -> int:
    """A length of time as sbatch reads it, where `1:30` is a minute and a half; 0: no limit."""
    if text.lower() in ("0", "infinite", "unlimited"):
        return 0
    match = re.fullmatch(r"(?:(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?)|(?:(?:(\d+):)?(\d+):(\d+))|(\d+)", text)
    if match is None:
        return parse_minutes(text)
    days, hours, minutes, seconds, clock, some, few, plain = (_count(part or "0") for part in match.groups())
    whole = (days * 24 + hours + clock) * 60 + minutes + some + plain
    return max(1, whole + (seconds + few > 0))


def _memory(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text, re.IGNORECASE)
    if match is None:
        raise ValueError
    return math.ceil(_count(match[1]) * _MEMORY[(match[2] or "M").upper()])


def _gpus(text: str) -> tuple[str, int]:
    """`2`, `a100:2`, `a100`."""
    kind, _, count = text.rpartition(":")
    if not kind and not count.isdecimal():
        return count, 1
    return kind, _count(count)


def _gres(text: str) -> tuple[str, int]:
    """`gpu:2`, `gpu:a100:2`; other resources of a node are none of ours."""
    for part in text.split(","):
        name, _, rest = part.removeprefix("gres/").removeprefix("gres:").partition(":")
        if name == "gpu":
            return _gpus(rest or "1")
    return "", 0
