"""What a job's owner should change next time, from what it used. One function for each thing to look at.

The sentences are messages: they keep their templates and values, and are translated where they are shown.
"""

import math
import statistics

from carme.jobs import Job, JobState, minutes_text
from carme.reports.models import Advice, Usage
from carme.translation import message as _
from carme.translation import plural
from carme.wording import number

__all__ = ["advise", "efficiency"]

GIB = 1 << 30
LONG_ENOUGH = 120.0  # seconds; shorter jobs are over before they have begun to work

IDLE = 0.05  # of the time
BUSY_GPU, LAZY_GPU = 0.8, 0.4
BUSY_CPU, LAZY_CPU = 0.85, 0.35
UNEVEN = 0.4
WAITS = 0.3  # of the time of training
MEMORY_FAR_BELOW, MEMORY_CLOSE = 0.4, 0.97
MEMORY_WORTH = 8 * GIB  # less is not worth a word
TIME_FAR_BELOW = 0.25


def efficiency(usage: Usage) -> dict[str, float]:
    """Shares used of what was given: `gpu`, `cpu`, `memory`; those that are known."""
    found = {}
    if usage.gpus:
        found["gpu"] = statistics.fmean(gpu.busy for gpu in usage.gpus)
    cpus = [(node.cpus_used, node.cpus) for node in usage.nodes if node.cpus and node.cpus_used is not None]
    if cpus:
        found["cpu"] = sum(used for used, _ in cpus) / sum(given for _, given in cpus)
    memory = [
        (node.memory_bytes, node.memory_limit_bytes)
        for node in usage.nodes
        if node.memory_bytes is not None and node.memory_limit_bytes
    ]
    if memory:
        found["memory"] = sum(used for used, _ in memory) / sum(given for _, given in memory)
    return {name: round(min(1.0, value), 4) for name, value in found.items()}


def advise(job: Job, usage: Usage | None) -> list[Advice]:
    """What to change, the weightiest first; empty when all is well or too little is known."""
    found = []
    if usage is not None and usage.seconds >= LONG_ENOUGH:
        message = _training(usage)
        # What ranks say of their waiting is better than what is guessed from GPUs and processors.
        guessed = [
            each for each in _gpus(job, usage) if not (message and each.topic in ("loader", "balance"))
        ]
        found += [*message, *guessed, *_memory(job, usage), *_cpus(job, usage)]
    elif job.state is JobState.OUT_OF_MEMORY:
        found += _out_of_memory(job)
    return [*found, *_time(job)]


def _gpus(job: Job, usage: Usage) -> list[Advice]:
    if not usage.gpus:
        return []
    idle = [gpu for gpu in usage.gpus if gpu.active < IDLE]
    count, working = len(usage.gpus), len(usage.gpus) - len(idle)
    each = math.ceil(working / max(1, job.nodes))
    if not working:
        return [
            Advice(
                topic="gpu",
                text=plural(
                    "The job's GPU did nothing. See that the program uses a GPU "
                    "(torch.cuda.is_available()), or ask for none.",
                    "None of the job's {count} GPUs did anything. See that the program uses a GPU "
                    "(torch.cuda.is_available()), or ask for none.",
                    count,
                ),
                change=_("leave out --gpus"),
            )
        ]
    if idle:
        return [
            Advice(
                topic="gpu",
                text=_(
                    "{idle} of the job's {count} GPUs did nothing. Ask for fewer, or start one process for "
                    "each.",
                    idle=len(idle),
                    count=count,
                ),
                change=_("--gpus {each}, or: carme-run -n {count} PROGRAM", each=each, count=count),
            )
        ]
    return _busy_gpus(usage)


def _busy_gpus(usage: Usage) -> list[Advice]:
    """What could make GPUs that all work work more."""
    busy = [gpu.busy for gpu in usage.gpus]
    mean = statistics.fmean(busy)
    if len(busy) > 1 and max(busy) - min(busy) > UNEVEN:
        return [
            Advice(
                topic="balance",
                text=_(
                    "The GPUs worked unevenly: the busiest {most:.0f} % of the time, the idlest {least:.0f} "
                    "%. Ranks wait for each other.",
                    most=100 * max(busy),
                    least=100 * min(busy),
                ),
                change=_("give all ranks equal shares of the data (torch.utils.data.DistributedSampler)"),
            )
        ]
    if mean >= LAZY_GPU:
        return []
    cpu = efficiency(usage).get("cpu")
    if cpu is not None and cpu > BUSY_CPU:
        given = max(node.cpus or 0 for node in usage.nodes)
        return [
            Advice(
                topic="loader",
                text=_waited(_("GPUs"), 1 - mean),
                change=f"--cpus {int(2 * given)}",
            )
        ]
    return [
        Advice(
            topic="gpu",
            text=_(
                "The GPUs worked {share:.0f} % of the time, and processors were free. Give the loader more "
                "workers, make batches larger, or copy small files to /tmp first.",
                share=100 * mean,
            ),
            change=_("DataLoader(..., num_workers=PROCESSORS, pin_memory=True)"),
        )
    ]


def _waited(waiting: str, share: float) -> str:
    return _(
        "The {who} waited for data {share:.0f} % of the time, while all processors were busy preparing it. "
        "Ask for more processors, or prepare the data once.",
        who=waiting,
        share=100 * share,
    )


def _training(usage: Usage) -> list[Advice]:
    seen = usage.training
    if seen is None:
        return []
    waiting, share = _("GPUs") if usage.gpus else _("ranks"), seen.data_wait or 0.0
    if share > WAITS:
        busy = (efficiency(usage).get("cpu") or 0.0) > BUSY_CPU
        given = max((node.cpus or 0 for node in usage.nodes), default=0)
        if busy and given:
            return [
                Advice(
                    topic="loader",
                    text=_waited(waiting, share),
                    change=f"--cpus {int(2 * given)}",
                )
            ]
        return [
            Advice(
                topic="loader",
                text=_(
                    "The {who} waited for data {share:.0f} % of the time, and processors were free. Stage "
                    "the folder to the nodes, and give the loader more workers.",
                    who=waiting,
                    share=100 * share,
                ),
                change=_(
                    "--stage local:FOLDER, and DataLoader(..., num_workers=PROCESSORS, "
                    "persistent_workers=True)"
                ),
            )
        ]
    if seen.ranks > 1 and (seen.rank_wait or 0.0) > WAITS:
        return [
            Advice(
                topic="balance",
                text=_(
                    "Ranks waited for each other {share:.0f} % of the time. Make each rank's batch larger, "
                    "give all ranks equal shares, or use fewer nodes; carme-run --profile shows which rank "
                    "comes last.",
                    share=100 * (seen.rank_wait or 0.0),
                ),
                change=_("carme-run --profile FOLDER PROGRAM"),
            )
        ]
    return []


def _memory(job: Job, usage: Usage) -> list[Advice]:
    used = max((node.memory_bytes or 0.0 for node in usage.nodes), default=0.0)
    limits = [node.memory_limit_bytes for node in usage.nodes if node.memory_limit_bytes]
    if job.state is JobState.OUT_OF_MEMORY:
        return _out_of_memory(job)
    if not limits or not used:
        return []
    limit = max(limits)
    wanted = max(GIB, math.ceil(1.25 * used / GIB) * GIB)
    if limit > MEMORY_WORTH and used < MEMORY_FAR_BELOW * limit and wanted < limit:
        return [
            Advice(
                topic="memory",
                text=_(
                    "The job used at most {used:.1f} of {limit:.1f} GiB on a node. Unused memory keeps "
                    "others, and you, waiting: smaller jobs start sooner.",
                    used=used / GIB,
                    limit=limit / GIB,
                ),
                change=f"--memory {wanted >> 20}",
            )
        ]
    return []


def _out_of_memory(job: Job) -> list[Advice]:
    each = job.memory_mb // max(1, job.nodes)
    return [
        Advice(
            topic="memory",
            text=_(
                "The job ran out of memory. Ask for more, or use smaller batches and fewer loader workers."
            ),
            change=f"--memory {math.ceil(1.5 * each / 1024) * 1024}" if each else _("--memory MIB"),
        )
    ]


def _cpus(job: Job, usage: Usage) -> list[Advice]:
    share = efficiency(usage).get("cpu")
    given = max((node.cpus or 0 for node in usage.nodes), default=0)
    used = max((node.cpus_used or 0.0 for node in usage.nodes), default=0.0)
    wanted = max(1, math.ceil(used * 1.2))
    # Processors come along with GPUs: there they are worth a word only where many are idle.
    worth = 8 if usage.gpus else 2
    if share is None or share >= LAZY_CPU or given - wanted < worth:
        return []
    return [
        Advice(
            topic="cpu",
            text=_(
                "On average {used:.1f} of {given} were busy.",
                used=used,
                given=number(int(given), "processor"),
            ),
            change=f"--cpus {wanted}",
        )
    ]


def _time(job: Job) -> list[Advice]:
    if job.state is JobState.TIMEOUT:
        return [
            Advice(
                topic="time",
                text=_(
                    "The job reached its time limit. Ask for more time, and save the state now and then so "
                    "that a new job goes on from there."
                ),
                change=f"--time {2 * job.minutes_limit}" if job.minutes_limit else _("--time MINUTES"),
            )
        ]
    if job.state is not JobState.COMPLETED or job.kind == "session" or not (job.started and job.ended):
        return []
    ran, limit = (job.ended - job.started).total_seconds() / 60, job.minutes_limit
    if not limit or limit < 60 or ran > TIME_FAR_BELOW * limit or ran < 1:
        return []
    wanted = max(15, math.ceil(1.5 * ran / 5) * 5)
    return [
        Advice(
            topic="time",
            text=_(
                "It took {took} of {limit}. Jobs with shorter limits fit into gaps and start sooner.",
                took=minutes_text(max(1, round(ran))),
                limit=minutes_text(limit),
            ),
            change=f"--time {wanted}",
        )
    ]
