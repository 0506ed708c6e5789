"""What jobs have and ask for, and nodes have, in Slurm's words for resources. Pure functions."""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

__all__ = [
    "ALLOTTED_FIELDS",
    "EXCLUSIVE",
    "MEMORY_UNITS",
    "Allotted",
    "allotted",
    "allotted_of",
    "gpus_counted",
    "gpus_requested",
    "gpus_used",
    "gres",
    "only_type",
    "records",
    "text_of",
    "to_int",
    "tres_of",
]

MEMORY_UNITS = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}

#: What squeue reports in its long form alone; none of it are words that users choose. `EXCLUSIVE` follows.
ALLOTTED_FIELDS = (
    *("JobID", "RestartCnt", "NumNodes", "NumTasks", "tres-alloc"),
    *("tres-per-job", "tres-per-node", "tres-per-socket", "tres-per-task"),
)
#: The field, in newer and older releases, that says whether a job has whole nodes, and what it says then. In
#: newer ones `OverSubscribe` is NO for ordinary jobs, too.
EXCLUSIVE = {"Exclusive": "NODE", "OverSubscribe": "NO"}


def records(output: str, separator: str, count: int) -> Iterator[list[str]]:
    """Records of `count` fields, each field followed by the separator."""
    fields = output.split(separator)[:-1]
    for first in range(0, len(fields) - count + 1, count):
        record = fields[first : first + count]
        record[0] = record[0].lstrip("\n")
        yield record


class Allotted(NamedTuple):
    """What a job has, or asks for while it waits; None is not known.

    Attributes:
        cpus, memory_mb: Over all nodes.
        whole_nodes: It gets all of its nodes, however little it asks for.
    """

    restarts: int = 0
    whole_nodes: bool = False
    gpus: dict[str, int] = {}  # noqa: RUF012  nobody changes it
    cpus: int | None = None
    memory_mb: int | None = None


def allotted(output: str, separator: str, exclusive: str) -> dict[int, Allotted]:
    """What jobs have, by id, in squeue's output with ALLOTTED_FIELDS and the field `exclusive`.

    While a job waits, `tres-alloc` is what it asks for, with GPUs only where the accounting counts them
    (AccountingStorageTRES). Else the ways to ask are added up as Slurm does; of GPUs for each socket one
    socket on each node is certain.
    """
    fields = (*ALLOTTED_FIELDS, exclusive)
    rows = (dict(zip(fields, record, strict=True)) for record in records(output, separator, len(fields)))
    return {
        int(field["JobID"]): allotted_of(field, field[exclusive] == EXCLUSIVE[exclusive])
        for field in rows
        if field["JobID"].isdecimal()
    }


def allotted_of(field: Mapping[str, str], whole_nodes: bool) -> Allotted:
    """What one job has; `field` has what squeue writes for each of ALLOTTED_FIELDS."""
    tres = tres_of(text_of(field["tres-alloc"]))
    nodes = max(1, to_int(field["NumNodes"]))
    times = {"job": 1, "node": nodes, "socket": nodes, "task": max(1, to_int(field["NumTasks"]))}
    requested = {unit: gpus_requested(field[f"tres-per-{unit}"]) for unit in times}
    # A job may name a total and what each node or task has of it.
    unit = next((unit for unit in ("job", "node", "task", "socket") if requested[unit]), "job")
    gpus = gpus_counted(tres) or {kind: many * times[unit] for kind, many in requested[unit].items()}
    if set(gpus) == {"gpu"} and len(kinds := {kind for each in requested.values() for kind in each}) == 1:
        gpus = {kinds.pop(): gpus["gpu"]}
    return Allotted(
        restarts=to_int(field["RestartCnt"]),
        whole_nodes=whole_nodes,
        gpus=gpus,
        cpus=int(tres["cpu"]) if "cpu" in tres else None,
        memory_mb=int(tres["mem"]) if "mem" in tres else None,
    )


def gres(text: str) -> dict[str, int]:
    """GPUs by type in `gpu:a100:4(S:0-1),gpu:v100:2` or `gpu:2(IDX:0-1)`."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *rest = part.split(":")
        if name != "gpu":
            continue
        kind = rest[0] if rest and not rest[0].isdecimal() else "gpu"
        count = int(rest[-1]) if rest and rest[-1].isdecimal() else 1
        found[kind] = found.get(kind, 0) + count
    return found


def gpus_requested(text: str) -> dict[str, int]:
    """GPUs by type in `gres:gpu:a100:2` (up to 23.02), `gres/gpu:a100:2` or `cpu=2,gres/gpu=2` (after)."""
    return gres(re.sub(r"gres[:/]", "", text).replace("=", ":"))


def gpus_counted(tres: Mapping[str, float]) -> dict[str, int]:
    """GPUs by type among `tres_of`; what of the total has no type is `gpu`."""
    found = {
        name.removeprefix("gres/gpu:"): int(count)
        for name, count in tres.items()
        if name.startswith("gres/gpu:") and count
    }
    rest = int(tres.get("gres/gpu", 0)) - sum(found.values())
    return found | ({"gpu": rest} if rest > 0 else {})


def only_type(gpus: Mapping[str, int]) -> str | None:
    """The type, where all are of one that is known."""
    # All jobs of a large site share the few names.
    return sys.intern(next(iter(gpus))) if len(gpus) == 1 and "gpu" not in gpus else None


def gpus_used(text: str) -> dict[str, int]:
    """GPUs in use by type, with those that are shared as shards: nobody else gets all of such a GPU.

    Slurm counts them apart: `gpu:a100:3(IDX:0-2),shard:a100:2(0/4,0/4,0/4,2/4)`; newer releases have `-/4`
    for what is in use as a whole.
    """
    found = gres(text)
    for kind, shards in re.findall(r"shard:(?:([^:,()]+):)?\d+\(([\d/,-]+)\)", text):
        shared = sum(not part.startswith(("0/", "-/")) for part in shards.split(","))
        kinds = [name for name in found if name == kind or not kind]
        name = kinds[0] if kinds else kind or "gpu"
        found[name] = found.get(name, 0) + shared
    return {kind: count for kind, count in found.items() if count}


def tres_of(text: str) -> dict[str, float]:
    """`cpu=2,mem=4000M,gres/gpu:a100=2` as numbers, memory in MiB."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if match := re.fullmatch(r"([0-9.]+)([KMGTP]?)", value):
            unit = MEMORY_UNITS[match[2]] if name == "mem" else 1.0
            found[name] = float(match[1]) * unit
    return found


def to_int(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def text_of(text: str) -> str:
    return "" if text in ("(null)", "N/A", "None") else text
