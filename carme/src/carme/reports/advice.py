"""What a job's owner should change next time, from what it used. One function for each thing to look at."""

import math
import statistics

from carme.jobs import Job, JobState, minutes_text
from carme.reports.models import Advice, Usage
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
        guessed = [one for one in _gpus(job, usage) if not (message and one.topic in ("loader", "balance"))]
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
        which = "The job's GPU" if count == 1 else f"None of the job's {count} GPUs"
        did = "did nothing" if count == 1 else "did anything"
        return [
            Advice(
                topic="gpu",
                text=f"{which} {did}. See that the program uses a GPU (torch.cuda.is_available()), or "
                "ask for none.",
                change="leave out --gpus",
            )
        ]
    if idle:
        return [
            Advice(
                topic="gpu",
                text=f"{len(idle)} of the job's {count} GPUs did nothing. Ask for fewer, or start one "
                "process for "
                "each.",
                change=f"--gpus {each}, or: carme-run -n {count} PROGRAM",
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
                text=f"The GPUs worked unevenly: the busiest {max(busy):.0%} of the time, the idlest "
                f"{min(busy):.0%}. "
                "Ranks wait for each other.",
                change="give all ranks equal shares of the data (torch.utils.data.DistributedSampler)",
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
                text=f"The GPUs waited for data {1 - mean:.0%} of the time, while all processors were "
                "busy preparing "
                "it. Ask for more processors, or prepare the data once.",
                change=f"--cpus {int(2 * given)}",
            )
        ]
    return [
        Advice(
            topic="gpu",
            text=f"The GPUs worked {mean:.0%} of the time, and processors were free. Give the loader "
            "more workers, "
            "make batches larger, or copy small files to /tmp first.",
            change="DataLoader(..., num_workers=PROCESSORS, pin_memory=True)",
        )
    ]


def _training(usage: Usage) -> list[Advice]:
    seen = usage.training
    if seen is None:
        return []
    who = "GPUs" if usage.gpus else "ranks"
    if (seen.data_wait or 0.0) > WAITS:
        busy = (efficiency(usage).get("cpu") or 0.0) > BUSY_CPU
        given = max((node.cpus or 0 for node in usage.nodes), default=0)
        if busy and given:
            return [
                Advice(
                    topic="loader",
                    text=f"The {who} waited for data {seen.data_wait:.0%} of the time, while all processors "
                    "were busy preparing it. Ask for more processors, or prepare the data once.",
                    change=f"--cpus {int(2 * given)}",
                )
            ]
        return [
            Advice(
                topic="loader",
                text=f"The {who} waited for data {seen.data_wait:.0%} of the time, and processors were free. "
                "Stage the folder to the nodes, and give the loader more workers.",
                change="--stage local:FOLDER, and DataLoader(..., num_workers=PROCESSORS, "
                "persistent_workers=True)",
            )
        ]
    if seen.ranks > 1 and (seen.rank_wait or 0.0) > WAITS:
        return [
            Advice(
                topic="balance",
                text=f"Ranks waited for each other {seen.rank_wait:.0%} of the time. Make each rank's batch "
                "larger, give all ranks equal shares, or use fewer nodes; carme-run --profile shows which "
                "rank comes last.",
                change="carme-run --profile FOLDER PROGRAM",
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
                text=f"At most {used / GIB:.1f} of {limit / GIB:.1f} GiB were used on a node. What is "
                "held and not "
                "used keeps others waiting, and yourself: smaller jobs start sooner.",
                change=f"--memory {wanted >> 20}",
            )
        ]
    return []


def _out_of_memory(job: Job) -> list[Advice]:
    each = job.memory_mb // max(1, job.nodes)
    return [
        Advice(
            topic="memory",
            text="The job ran out of memory. Ask for more, or use smaller batches and fewer loader workers.",
            change=f"--memory {math.ceil(1.5 * each / 1024) * 1024}" if each else "--memory MIB",
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
            text=f"On average {used:.1f} of {number(int(given), 'processor')} worked.",
            change=f"--cpus {wanted}",
        )
    ]


def _time(job: Job) -> list[Advice]:
    if job.state is JobState.TIMEOUT:
        return [
            Advice(
                topic="time",
                text="The job reached its time limit. Ask for more time, and save the state now and "
                "then so that a "
                "new job goes on from there.",
                change=f"--time {2 * job.minutes_limit}" if job.minutes_limit else "--time MINUTES",
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
            text=f"It took {minutes_text(max(1, round(ran)))} of {minutes_text(limit)}. Jobs with "
            "shorter limits fit "
            "into gaps and start sooner.",
            change=f"--time {wanted}",
        )
    ]
