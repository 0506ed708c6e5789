"""Output as real Slurms write it: 22.05 and 24.11."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carme.errors import NotFound, SlurmError
from carme.jobs import JobState, Partition
from carme.slurm import Label, parsing, tres
from carme.slurm.refusals import refusal

S = "|5f|"
KEY = "0123456789abcdef0123456789abcdef"


def line(*fields: str) -> str:
    return S.join(fields) + S + "\n"


def test_the_queue_is_parsed() -> None:
    output = line(
        *("7", "ada", "carme", "gpu", "RUNNING", "None", "2", "n[1-2]", "gres/gpu:a100:2", "4", "2000M"),
        *(
            *("1-01:30:00", "1-00:30:00", "1795181538"),
            "1795181539",
            "1795186939",
            *("4294901757", "(null)", "night", "normal", "n1", "7", "N/A"),
            "a b",
            f"carme/1 kind=session image=torch key={KEY}",
        ),
    ) + line(
        *("8", "bob", "(null)", "long", "PENDING", "Resources", "1", "", "N/A", "1", "100M"),
        *(
            *("UNLIMITED", "UNLIMITED", "1795181538"),
            "1795190000",
            "N/A",
            "17",
            "n[1-2]",
            "(null)",
            "long",
            "n/a",
            *("8", "N/A"),
            "evil\n9|5e|x",
            "(null)",
        ),
    )
    job, bobs = parsing.queue(output, S)
    assert (job.id, job.key, job.kind, job.image, job.name) == (7, KEY, "session", "torch", "a b")
    assert (job.gpus, job.gpu_type, job.memory_mb, job.minutes_limit) == (4, "a100", 4000, 1530)
    assert job.started == datetime(2026, 11, 20, 13, 32, 19, tzinfo=UTC)
    assert job.planned_end == job.ends == datetime(2026, 11, 20, 15, 2, 19, tzinfo=UTC)
    assert job.ended is None  # the end of a running job is a limit, not an end
    assert (bobs.kind, bobs.key, bobs.name, bobs.minutes_limit) == ("other", None, "evil\n9|5e|x", None)
    assert bobs.started is None
    assert bobs.planned_start == datetime(2026, 11, 20, 15, 53, 20, tzinfo=UTC)
    assert (bobs.planned_nodes, bobs.priority, bobs.reservation) == ("n[1-2]", 17, "")
    assert (job.planned_start, job.priority, job.reservation) == (None, 4294901757, "night")
    assert bobs.explanation.startswith("The job is next in line")


@pytest.mark.parametrize(
    ("state", "first", "nodes", "gone"),
    [
        ("RUNNING", "n1", "n[1-2]", ""),
        ("RUNNING", "n1", "n[2-3]", "n1"),
        ("CANCELLED", "n1", "n2", "n1"),
        ("COMPLETING", "n1", "n2", ""),  # n1 has finished already
        ("PENDING", "n/a", "", ""),
    ],
)
def test_a_lost_first_node_is_recognised(state: str, first: str, nodes: str, gone: str) -> None:
    head = ("7", "ada", "", "gpu", state, "None", "1", nodes, "N/A", "1", "1M", "1:00:00", "0:30")
    (job,) = parsing.queue(line(*head, "1", "1", "1", "1", "", "", "", first, "7", "N/A", "a", "(null)"), S)
    assert job.failed_node == gone


@given(st.text(), st.text())
def test_no_name_or_comment_makes_a_job_up(name: str, comment: str) -> None:
    state = ("7", "ada", "", "gpu", "RUNNING", "None", "1", "n1", "N/A", "1", "1M", "1:00:00", "0:30")
    head = (*state, "1", "1", "1", "1", "", "", "", "n1", "7", "N/A")
    jobs = parsing.queue(line(*head, name, comment) + line("8", *head[1:], "b", "c"), S)
    assert S in name + comment or [(job.id, job.user) for job in jobs] == [(7, "ada"), (8, "ada")]


@pytest.mark.parametrize(
    ("number", "array", "which", "expected"),
    [
        ("12", "12", "N/A", (None, None, "", "12")),
        ("12", "12", "3-9%2", (12, None, "3-9%2", "12_[3-9]")),
        ("12", "12", "1,5-9:2", (12, None, "1,5-9:2", "12_[1,5-9:2]")),
        ("12", "12", "9%2", (12, 9, "", "12_9")),
        ("15", "12", "4", (12, 4, "", "12_4")),
    ],
)
def test_tasks_of_an_array_are_parsed_from_the_queue(
    number: str, array: str, which: str, expected: tuple[object, ...]
) -> None:
    head = (number, "ada", "", "gpu", "PENDING", "None", "1", "", "N/A", "1", "1M", "1:00:00", "0:30")
    rest = ("1", "1", "1", "1", "", "", "", "n/a", array, which, "a", "(null)")
    (job,) = parsing.queue(line(*head, *rest), S)
    assert (job.array_id, job.task, job.tasks, job.slurm_name) == expected
    if job.tasks:
        assert job.has_task(12, 5) and not job.has_task(12, 2) and not job.has_task(13, 5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("12", {}),
        ("12_3", {"array_id": 12, "task": 3}),
        ("12_[4-9%2]", {"array_id": 12, "tasks": "4-9%2"}),
        ("12_[7]", {"array_id": 12, "task": 7}),
    ],
)
def test_tasks_of_an_array_are_parsed_from_the_accounting(name: str, expected: dict[str, object]) -> None:
    assert parsing.array_of(name) == expected


def test_exit_statuses_of_a_newer_slurm_are_parsed() -> None:
    found = parsing.exit_statuses(f"{39:<20}{'3:0':<20}\n{40:<20}{'0:9':<20}\n")
    assert (found[39].exit_code, found[39].signal) == (3, 0)
    assert (found[40].exit_code, found[40].signal) == (0, 9)


def test_exit_statuses_are_parsed() -> None:
    found = parsing.exit_statuses(f"{1:<20}{768:<20}\n{2:<20}{9:<20}\nslurm_load_jobs error: x\n")
    assert found == {1: (3, 0), 2: (0, 9)}


def test_the_accounting_is_parsed() -> None:
    def job(*ending: str) -> str:
        return line(
            *ending,
            *("2", "n[1-2]", "cpu=4", "billing=4,cpu=4,gres/gpu:a100=4,gres/gpu=4,mem=4000M,node=2", "90"),
            *(
                "1795181538",
                "1795181539",
                "1795181600",
                *("None", "night", "normal", "1000", ending[0]),
                "a b",
                f"carme/1 kind=batch image= key={KEY}",
            ),
        )

    jobs = parsing.accounting(
        job("7", "ada", "carme", "gpu", "CANCELLED by 1000", "0:15")
        + job("7.batch", "", "carme", "", "FAILED", "1:0")
        + job("9", "ada", "carme", "gpu", "FAILED", "3:0")
        + job("10", "ada", "carme", "gpu", "RUNNING", "0:0")
        + job("11", "ada", "carme", "gpu", "CANCELLED by 0", "0:15"),
        S,
    )
    assert [(j.id, j.state, j.exit_code, j.signal) for j in jobs] == [
        (7, JobState.CANCELLED, 0, 15),
        (9, JobState.FAILED, 3, None),
        (10, JobState.RUNNING, None, None),
        (11, JobState.CANCELLED, 0, 15),
    ]
    assert [j.cancelled_by for j in jobs] == ["owner", None, None, "root"]
    assert jobs[0].reservation == "night"
    assert (jobs[0].gpus, jobs[0].gpu_type, jobs[0].memory_mb, jobs[0].cpus) == (4, "a100", 4000, 4)
    assert (jobs[0].kind, jobs[0].image, jobs[0].key) == ("batch", None, KEY)


def test_a_job_that_lost_a_node_is_one_job_in_the_accounting() -> None:
    def job(state: str, nodes: str, start: str, end: str) -> str:
        head = line(
            "7", "ada", "carme", "gpu", state, "0:0", "1", nodes, "cpu=4", "cpu=4", "90", "1795181538"
        )
        return head.rstrip("\n") + line(start, end, "None", "", "normal", "1000", "7", "a", "")

    records = job("RESIZING", "n[1-3]", "1795181539", "1795181600")
    records += job("RESIZING", "n[1-2]", "1795181600", "1795181700")
    (last,) = parsing.accounting(records + job("COMPLETED", "n1", "1795181700", "1795181800"), S)
    assert (last.state, last.node_list) == (JobState.COMPLETED, "n1")
    assert last.started == datetime(2026, 11, 20, 13, 32, 19, tzinfo=UTC)


def test_nodes_and_partitions_are_parsed() -> None:
    nodes, partitions = (
        Path(__file__).with_name(f"{name}.txt").read_text() for name in ("nodes", "partitions")
    )
    cluster = parsing.cluster(nodes, partitions)
    gpu, long, cpu = cluster.partitions
    assert (gpu.default, gpu.max_minutes, gpu.node_names) == (True, 1440, ["n1", "n2"])
    assert (long.default, long.max_minutes, cpu.state) == (False, None, "DOWN")
    assert (gpu.groups, gpu.accounts, gpu.refused_accounts) == ([], [], [])
    assert (cpu.groups, cpu.accounts, cpu.refused_accounts) == (["staff", "physics"], ["vision"], [])
    n1, n2, n3 = cluster.nodes
    assert (n1.cpus, n1.cpus_used, n1.memory_mb, n1.memory_used_mb) == (8, 2, 16000, 1000)
    assert (n1.gpus, n1.gpus_used, n1.available, n1.reason) == ({"a100": 4}, {"a100": 1}, True, "")
    assert (n2.gpus, n2.gpus_used, n2.available, n2.reason) == ({"a100": 2, "v100": 2}, {}, False, "bad fan")
    assert (n3.gpus, n3.available, n3.reason) == ({}, False, "Not responding")


def test_a_partition_takes_or_refuses_accounts_and_qualities() -> None:
    """A list of accepted accounts overrides the list of refused ones, as in Slurm."""
    every = Partition(name="all")
    assert not every.refuses_account("carme") and not every.refuses_qos("normal") and not every.is_limited
    limited = Partition(name="p", accounts=["vision"], qos=["long"], refused_accounts=["vision"])
    assert limited.refuses_account("carme") and not limited.refuses_account("vision") and limited.is_limited
    assert limited.refuses_qos("normal") and not limited.refuses_qos("long")
    refusing = Partition(name="p", refused_accounts=["guests"], refused_qos=["low"])
    assert refusing.refuses_account("guests") and not refusing.refuses_account("carme")
    assert refusing.refuses_qos("low") and not refusing.refuses_qos("normal")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gres:gpu:a100:2", {"a100": 2}),
        ("gres/gpu:a100:2", {"a100": 2}),
        ("gres:gpu:3", {"gpu": 3}),
        ("gres/gpu", {"gpu": 1}),
        ("gres/gpu=2", {"gpu": 2}),
        ("cpu=2,gres/gpu:a100=1", {"a100": 1}),
        ("gres/gpu:1g.5gb:3,gres/gpu:2g.10gb:1", {"1g.5gb": 3, "2g.10gb": 1}),
        ("N/A", {}),
        ("gres/shard:4,gres/gpu:1", {"gpu": 1}),
    ],
)
def test_gpus_are_parsed_from_gres(text: str, expected: dict[str, int]) -> None:
    assert tres.gpus_requested(text) == expected


#: Each form of request that sbatch took, and what squeue then printed: 24.11 with GPUs in the accounting and
#: 22.05 without. Fields: restarts, nodes, tasks, TRES, TRES per job, node, socket, task, OverSubscribe.
REQUESTED = {
    "--gpus=1, running": (
        "0|1|1|cpu=1,mem=100M,node=1,billing=1,gres/gpu=1,gres/gpu:a100=1|gres/gpu:1|N/A|N/A|N/A|OK",
        ({"a100": 1}, 1, 100),
    ),
    "--gpus=1 on 22.05": (
        "0|1|1|cpu=1,mem=8000M,node=1,billing=1|gres:gpu:1|N/A|N/A|N/A|OK",
        ({"gpu": 1}, 1, 8000),
    ),
    "--gpus=3": (
        "0|1|1|cpu=1,mem=100M,node=1,billing=1,gres/gpu=3|gres/gpu:3|N/A|N/A|N/A|OK",
        ({"gpu": 3}, 1, 100),
    ),
    "--gpus=a100:2": (
        "0|1|1|cpu=1,mem=100M,node=1,billing=1,gres/gpu=2,gres/gpu:a100=2|gres/gpu:a100:2|N/A|N/A|N/A|OK",
        ({"a100": 2}, 1, 100),
    ),
    "--gpus=a100:2 without types in the accounting": (
        "0|1|1|cpu=1,mem=100M,node=1,billing=1,gres/gpu=2|gres/gpu:a100:2|N/A|N/A|N/A|OK",
        ({"a100": 2}, 1, 100),
    ),
    "--gpus-per-task=1 --ntasks=2": (
        "0|1|2|cpu=2,mem=100M,node=1,billing=2,gres/gpu=2|N/A|N/A|N/A|gres/gpu=1|OK",
        ({"gpu": 2}, 2, 100),
    ),
    "--gpus-per-task=1 --ntasks=2 on 22.05": (
        "0|1|2|cpu=2,mem=8000M,node=1,billing=2|N/A|N/A|N/A|gres:gpu:1|OK",
        ({"gpu": 2}, 2, 8000),
    ),
    "--tres-per-task=gres/gpu:1 --ntasks=2": (
        "0|1|2|cpu=2,mem=100M,node=1,billing=2,gres/gpu=2|N/A|N/A|N/A|gres/gpu:1|OK",
        ({"gpu": 2}, 2, 100),
    ),
    "--gpus-per-socket=1": (
        "0|1|1|cpu=1,mem=100M,node=1,billing=1,gres/gpu=1|N/A|N/A|gres/gpu:1|N/A|OK",
        ({"gpu": 1}, 1, 100),
    ),
    "--gpus-per-socket=1 on 22.05": (
        "0|1|1|cpu=1,mem=8000M,node=1,billing=1|N/A|N/A|gres:gpu:1|N/A|OK",
        ({"gpu": 1}, 1, 8000),
    ),
    "--gpus=2 --ntasks-per-gpu=2": (
        "0|1|4|cpu=4,mem=100M,node=1,billing=4,gres/gpu=2|gres/gpu:2|N/A|N/A|N/A|OK",
        ({"gpu": 2}, 4, 100),
    ),
    "--gpus-per-node=a100:1, two nodes, on 22.05": (
        "0|2|2|cpu=2,mem=8000M,node=2,billing=2|N/A|gres:gpu:a100:1|N/A|N/A|OK",
        ({"a100": 2}, 2, 8000),
    ),
    "--gres=shard:2": (
        "0|1|1|cpu=1,mem=100M,node=1,billing=1,gres/shard=2|N/A|gres/shard:2|N/A|N/A|OK",
        ({}, 1, 100),
    ),
    "--gres=gpu:1g.5gb:1": (
        "0|1|1|cpu=1,mem=100M,node=1,billing=1,gres/gpu=1,gres/gpu:1g.5gb=1|N/A|gres/gpu:1g.5gb:1|N/A|N/A|OK",
        ({"1g.5gb": 1}, 1, 100),
    ),
    "--mem=0": ("0|1|1|cpu=1,mem=8000M,node=1,billing=1|N/A|N/A|N/A|N/A|OK", ({}, 1, 8000)),
    "--exclusive, running": (
        "0|1|1|cpu=8,mem=100M,node=1,billing=8,gres/gpu=4,gres/gpu:a100=4|N/A|N/A|N/A|N/A|NO",
        ({"a100": 4}, 8, 100),
    ),
}


@pytest.mark.parametrize("request_", REQUESTED)
def test_allotted_resources_are_parsed_for_every_form_of_request(request_: str) -> None:
    recorded, (gpus, cpus, memory_mb) = REQUESTED[request_]
    (has,) = tres.allotted("9|" + recorded + "|\n", "|", "OverSubscribe").values()
    assert (has.gpus, has.cpus, has.memory_mb) == (gpus, cpus, memory_mb)
    assert has.whole_nodes == ("exclusive" in request_)


def test_a_job_has_what_slurm_allotted_it() -> None:
    head = ("9", "ada", "", "gpu", "RUNNING", "None", "2", "n[1-2]", "N/A", "1", "1M", "1:00:00", "30:00")
    short = line(*head, "1", "1", "1795181538", "1", "", "", "", "n1", "9", "N/A", "a", "(null)")
    recorded = "9|3|2|2|cpu=2,mem=200M,node=2,gres/gpu=3,gres/gpu:a100=3|gres/gpu:3|N/A|N/A|N/A|NO|"
    (job,) = parsing.queue(short, S, tres.allotted(recorded, "|", "Exclusive"))
    assert not job.whole_nodes  # in newer releases that is another field
    assert (job.gpus, job.gpu_type, job.cpus, job.memory_mb, job.restarts) == (3, "a100", 2, 200, 3)


def test_a_shared_gpu_is_not_free() -> None:
    # As 24.11 shows a node with a job of three GPUs and one of two shards.
    used = "gpu:a100:3(IDX:0-2),shard:a100:2(0/4,0/4,0/4,2/4)"
    assert tres.gpus_used(used) == {"a100": 3 + 1}
    assert tres.gpus_used("gpu:a100:0(IDX:N/A),shard:a100:0(0/4,0/4,0/4,0/4)") == {}
    assert tres.gpus_used("gpu:0,shard:3(3/4,0/4)") == {"gpu": 1}
    # As 26.05 shows it: a GPU that is in use as a whole has no shards to give.
    assert tres.gpus_used("gpu:a100:1(IDX:0),shard:a100:1(-/4,1/4,0/4,0/4)") == {"a100": 2}


def test_memory_times_and_numbers_are_parsed() -> None:
    assert [parsing.memory(text, 4) for text in ("100M", "2.50G", "100Mc", "1000Mn", "?")] == [
        100,
        2560,
        400,
        1000,
        0,
    ]
    assert [parsing.minutes(text) for text in ("30:00", "1:30:00", "2-00:00:00", "UNLIMITED")] == [
        30,
        90,
        2880,
        None,
    ]
    assert parsing.time("2026-11-20T13:00:00") == datetime(2026, 11, 20, 13, tzinfo=UTC)
    assert [parsing.time(text) for text in ("N/A", "Unknown", "", "0")] == [None] * 4


@given(st.text())
def test_only_labels_of_carme_are_parsed(comment: str) -> None:
    assert Label.read(comment) is None or comment.startswith("carme/1 ")


def test_a_label_survives() -> None:
    for label in (Label("session", "torch-2.1", KEY), Label("batch", None, KEY)):
        assert Label.read(str(label)) == label
    assert Label.read(f"carme/1 kind=session image=torch key={KEY}/../x") is None


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination",
            SlurmError,
            "does not let you use this account",
        ),
        ("sbatch: error: invalid partition specified: nopart", SlurmError, "does not know this partition"),
        ("allocation failure: Requested node configuration is not available", SlurmError, "can ever give"),
        (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            SlurmError,
            "does not answer",
        ),
        ("Slurm accounting storage is disabled", SlurmError, "has no accounting"),
        (
            "scancel: error: Kill job error on job id 9: Invalid job id specified",
            NotFound,
            "does not know this job (any more)",
        ),
        ("sbatch: error: The moon is full", SlurmError, "refused: sbatch says 'The moon is full'"),
        ("", SlurmError, "says 'nothing'"),
    ],
)
def test_answers_of_slurm_become_errors(answer: str, kind: type[Exception], words: str) -> None:
    error = refusal("sbatch", answer)
    assert type(error) is kind
    assert words in error.message
    assert error.remedy


def test_hidden_partitions_are_known_as_such() -> None:
    lines = "PartitionName=gpu Hidden=NO State=UP\nPartitionName=secret Hidden=YES State=UP\n"
    assert [(partition.name, partition.hidden) for partition in parsing.cluster("", lines).partitions] == [
        ("gpu", False),
        ("secret", True),
    ]
