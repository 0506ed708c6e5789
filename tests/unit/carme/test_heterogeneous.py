"""Jobs of `sbatch A : B`, as 24.11 wrote them: each component has a number, nodes and GPUs of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from carme.slurm import parsing, tres

from .conftest import Site, carme

#: `sbatch --gpus=1 ... : --ntasks=2 --gpus-per-task=1 ...` in squeue's short and long form.
RUNNING = (
    """\
938|ada|carme|gpu|RUNNING|None|1|n1|N/A|1|100M|20:00:00|19:59:52|1795723814|1795723815|1795795815|1|(null)|(null)|normal|n1|938|N/A|wrap|(null)
939|ada|carme|gpu|RUNNING|None|1|n2|N/A|2|100M|20:00:00|19:59:52|1795723814|1795723815|1795795815|1|(null)|(null)|normal|n2|939|N/A|wrap|(null)
""",
    """\
938|0|1|1|cpu=1,mem=100M,node=1,billing=1,gres/gpu=1,gres/gpu:a100=1|gres/gpu:1|N/A|N/A|N/A|OK
939|0|1|2|cpu=2,mem=100M,node=1,billing=2,gres/gpu=2,gres/gpu:a100=2|N/A|N/A|N/A|gres/gpu=1|OK
""",
)
WAITING = (
    """\
940|ada|carme|gpu|PENDING|BeginTime|1||N/A|1|100M|20:00:00|20:00:00|1795723931|1795727531|1795799531|1|(null)|(null)|normal|n/a|940|N/A|wrap|(null)
941|ada|carme|gpu|PENDING|BeginTime|1||N/A|2|100M|20:00:00|20:00:00|1795723931|1795727531|1795799531|1|(null)|(null)|normal|n/a|941|N/A|wrap|(null)
""",
    """\
940|0|1|1|cpu=1,mem=100M,node=1,billing=1,gres/gpu=1|gres/gpu:1|N/A|N/A|N/A|OK
941|0|1|2|cpu=2,mem=100M,node=1,billing=2,gres/gpu=2|N/A|N/A|N/A|gres/gpu=1|OK
""",
)
#: The first ones in sacct, with the fields that differ from those of other jobs.
ENDED = """\
938|938+0|n1|billing=1,cpu=1,gres/gpu=1,mem=100M,node=1|billing=1,cpu=1,gres/gpu:a100=1,gres/gpu=1,mem=100M,node=1
939|938+1|n2|billing=2,cpu=2,gres/gpu=2,mem=100M,node=1|billing=2,cpu=2,gres/gpu:a100=2,gres/gpu=2,mem=100M,node=1
"""
REFUSED = (
    "scancel: error: Kill job error on job id 941: Operation not permitted on individual component of "
    "heterogeneous job"
)


def queued(short: str, long: str) -> list[dict[str, Any]]:
    """What squeue knows of the components, by field."""
    fields = (*tres.ALLOTTED_FIELDS, "OverSubscribe")
    return [
        dict(zip(fields, more.split("|"), strict=True))
        | dict(zip(parsing.QUEUE_FIELDS, line.split("|"), strict=True))
        for line, more in zip(short.splitlines(), long.splitlines(), strict=True)
    ]


async def test_each_component_has_its_number_nodes_and_gpus(
    site: Site, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for recorded, first, nodes, kind in (
        (RUNNING, 938, ["n1", "n2"], "a100"),
        (WAITING, 940, ["", ""], None),
    ):
        await site.queue(queued(*recorded))
        assert await carme("jobs", "--json") == 0
        found = sorted(json.loads(capsys.readouterr().out), key=lambda job: job["id"])
        assert [job["id"] for job in found] == [first, first + 1]
        assert [(job["gpus"], job["cpus"], job["memory_mb"]) for job in found] == [(1, 1, 100), (2, 2, 100)]
        assert [(job["node_list"], job["gpu_type"]) for job in found] == [(node, kind) for node in nodes]
        assert all(job["array_id"] is None and job["task"] is None for job in found)
    assert await carme("jobs") == 0
    rows = [line.split()[:5] for line in capsys.readouterr().out.splitlines()[1:]]
    assert sorted(rows) == [["940", "wrap", "pending", "1", "1"], ["941", "wrap", "pending", "1", "2"]]


async def test_what_waits_is_cancelled_by_its_first_component(
    site: Site, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await site.queue(queued(*WAITING))
    site.slurm.fail("scancel", REFUSED)
    assert await carme("cancel", "941") == 1
    message = capsys.readouterr().err
    assert "Slurm ends a heterogeneous job that waits only as a whole." in message
    assert "Cancel its first component." in message


def test_what_has_ended_keeps_its_numbers() -> None:
    separator, lines = "|5f|", []
    for line in ENDED.splitlines():
        raw, name, node, requested, allotted = line.split("|")
        known = {
            "JobIDRaw": raw,
            "JobID": name,
            "State": "CANCELLED by 2001",
            "NodeList": node,
            "UID": "2001",
        }
        known |= {"ReqTRES": requested, "AllocTRES": allotted, "NNodes": "1", "ExitCode": "0:0"}
        lines.append(separator.join(known.get(field, "") for field in parsing.ACCOUNTING_FIELDS) + separator)
    found = parsing.accounting("\n".join(lines) + "\n", separator)
    assert [(job.id, job.node_list, job.gpus, job.gpu_type) for job in found] == [
        (938, "n1", 1, "a100"), (939, "n2", 2, "a100"),
    ]  # fmt: skip
    assert [(job.array_id, job.cancelled_by) for job in found] == [(None, "owner")] * 2
