import pickle
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carme.config import Settings
from carme.config.settings import PartitionSettings
from carme.errors import CarmeError, InvalidRequest
from carme.images import ImageCatalogue
from carme.jobs import (
    TRANSITIONS,
    Cluster,
    Job,
    JobRequest,
    JobState,
    Node,
    Partition,
    Phase,
    SessionOptions,
    check,
    minutes_text,
    parse_minutes,
    share,
    waiting_for,
)
from carme.jobs.explanations import PENDING_REASONS
from carme.jobs.nodes import expand

GOOD: dict[str, Any] = {"name": "a", "kind": "batch", "command": ["x"], "minutes": 5}


def node(name: str, **values: Any) -> Node:
    return Node.model_validate({"name": name, "cpus": 8, "memory_mb": 16000, **values})


CLUSTER = Cluster(
    taken=datetime.now(UTC),
    partitions=[
        Partition(name="gpu", default=True, max_minutes=1440, node_names=["n1", "n2"]),
        Partition(name="cpu", node_names=["n3"]),
        Partition(name="empty"),
    ],
    nodes=[
        node("n1", gpus={"a100": 4}),
        node("n2", gpus={"a100": 2, "v100": 2}, cpus=6, memory_mb=8000),
        node("n3", cpus=4, memory_mb=1500),
    ],
)


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-2,07],gpu1", ["n1", "n2", "n07", "gpu1"]),
        ("n[08-10]-ib", ["n08-ib", "n09-ib", "n10-ib"]),
        ("a,b", ["a", "b"]),
        ("", []),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
    ],
)
def test_host_lists_in_slurms_short_form_are_expanded(short: str, names: list[str]) -> None:
    assert expand(short) == names


# States


def test_every_state_has_a_phase_and_the_properties_follow_it() -> None:
    for state in JobState:
        job = Job(id=1, name="a", user="u", state=state)
        phase = state.phase
        assert job.is_active is not job.is_over
        assert (job.is_pending, job.is_running, job.is_over) == (
            phase is Phase.PENDING,
            phase is Phase.RUNNING,
            phase is Phase.OVER,
        )


def test_from_every_phase_a_job_can_come_to_its_end() -> None:
    assert set(TRANSITIONS) == set(Phase)
    for phase in Phase:
        reached, last = {phase}, set()
        while reached != last:
            last = reached
            reached = reached.union(*(TRANSITIONS[known] for known in reached))
        assert Phase.OVER in reached
        assert phase not in TRANSITIONS[phase]


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("BRAND_NEW", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_states_of_slurm_are_parsed(text: str, state: JobState) -> None:
    assert JobState.parse(text) is state


# Explanations


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "waits for nodes, processors, memory or GPUs"),
        ("(Priority)", "higher priority"),
        ("None", "just been submitted"),
        ("", "just been submitted"),
        ("QOSMaxGRESPerUser", "the limit that the quality of service has on GPUs"),
        ("AssocGrpGRES", "the limit that your account has on GPUs"),
        ("AssocGrpCPUMinutesLimit", "your account has on processors over time"),
        ("QOSMinGRES", "less GPUs than the quality of service demands; cancel it and ask for more"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "down, drained or reserved"),
        ("PartitionDown", "partition is down"),
        ("PartitionTimeLimit", "more time than its partition allows"),
        ("SomethingNew", "Slurm says 'SomethingNew'"),
        ("SomethingNew (broken)", "Slurm says 'SomethingNew (broken)'"),
        ("JobHeldAdmin (broken (again))", "put the job on hold (broken (again)); ask them"),
        ("(JobHeldAdmin (broken))", "put the job on hold (broken); ask them"),
        ("Resources (see ticket 5)", "next in line and waits (see ticket 5); wait"),
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions (x)",
            "reserved for more important jobs (x)",
        ),
    ],
)
def test_a_reason_of_slurm_becomes_an_explanation(reason: str, words: str) -> None:
    assert words in waiting_for(reason)


def test_every_reason_is_one_sentence() -> None:
    for sentence in PENDING_REASONS.values():
        assert sentence[0].isupper() and sentence.endswith(".") and sentence.count(". ") == 0


def test_the_explanation_travels_with_the_job() -> None:
    job = Job(id=1, name="a", user="u", state=JobState.TIMEOUT)
    assert "time limit" in job.model_dump()["explanation"]
    assert Job.model_validate_json(job.model_dump_json()) == job


# Times


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("45m", 45),
        ("2h", 120),
        ("1d12h", 2160),
        ("1:30:00", 90),
        ("1-00:00:01", 1441),
        (" 2H ", 120),
    ],
)
def test_lengths_of_time_are_read_in_minutes(text: str, minutes: int) -> None:
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "0", "x", "-5", "1:70:00", "2 hours", "1.5h", "٣", "0:00:00"])
def test_an_invalid_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is not a length of time. Write minutes like 90"):
        parse_minutes(text)


@given(st.integers(min_value=1, max_value=10**6))
def test_minutes_in_words_lose_nothing(minutes: int) -> None:
    short = minutes_text(minutes)
    for word, unit in (("day", "d"), ("hour", "h"), ("minute", "m")):
        short = short.replace(f" {word}s", unit).replace(f" {word}", unit)
    assert parse_minutes(short.replace(" ", "")) == minutes


# Requests


@pytest.mark.parametrize(
    ("change", "field", "sentence"),
    [
        ({"name": ""}, "name", "must be 1 to 64 letters"),
        ({"name": "a\n"}, "name", "must be 1 to 64 letters"),
        ({"name": "x" * 65}, "name", "must be 1 to 64 letters"),
        ({"command": []}, "command", "'command' must not be empty."),
        ({"command": [""]}, None, "must have a program"),
        ({"command": ["a", "b\0"]}, "command[1]", "NUL"),
        ({"minutes": 0}, "minutes", "'minutes' must be at least 1, not 0."),
        ({"minutes": "x"}, "minutes", "must be a whole number, not 'x'."),
        ({"nodes": 0}, "nodes", "at least 1"),
        ({"gpus_per_node": -1}, "gpus_per_node", "at least 0"),
        ({"gpu_type": "a100,gpu:9"}, "gpu_type", "letters, digits"),
        ({"partition": "--reservation=x"}, "partition", "letters, digits"),
        ({"account": ""}, "account", "letters, digits"),
        ({"environment": {"A=B": "c"}}, "environment", "has a variable 'A=B'"),
        ({"environment": {"A": "c\0"}}, "environment", "NUL"),
        ({"workdir": "here"}, "workdir", "must be an absolute path"),
        ({"kind": "other"}, "kind", "must be 'session' or 'batch', not 'other'."),
        ({"kind": "session"}, None, "for a session must name an image"),
        (
            {"gpus_pernode": 2},
            "gpus_pernode",
            "There is no field 'gpus_pernode' in a request. The nearest known one is 'gpus_per_node'.",
        ),
    ],
)
def test_a_wrong_request_names_its_field(change: dict[str, Any], field: str | None, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        JobRequest.read(GOOD | change)
    assert sentence in str(caught.value)
    assert caught.value.field == field


@given(st.text())
def test_only_plain_names_pass(name: str) -> None:
    plain = 1 <= len(name) <= 64 and all(c.isascii() and (c.isalnum() or c in "._ -") for c in name)
    try:
        JobRequest.read(GOOD | {"name": name})
    except InvalidRequest:
        assert not plain
    else:
        assert plain


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda kids: st.lists(kids) | st.dictionaries(st.text(), kids),
    )
)
def test_any_other_value_is_refused_with_a_sentence(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        JobRequest.read(value)
    assert str(caught.value)


def test_a_session_requests_what_its_options_say() -> None:
    options = SessionOptions(
        image="torch", nodes=2, gpus_per_node=1, gpu_type="a100", minutes=90, title="Mine"
    )
    request = options.request(name="session-s1", command=["carme-singleuser"], environment={"TOKEN": "t"})
    assert request.kind == "session"
    assert (request.image, request.nodes, request.gpus_per_node, request.minutes) == ("torch", 2, 1, 90)
    assert request.environment == {"TOKEN": "t"}


# Checks


@pytest.fixture
def images(settings: Settings) -> ImageCatalogue:
    return ImageCatalogue(settings.images.directory)


@pytest.mark.parametrize(
    ("change", "field", "sentence"),
    [
        (
            {"gpus_per_node": 9, "gpu_type": "a100"},
            "gpus_per_node",
            "A node has at most 4 GPUs of type a100; 9 were requested. Ask for 1 to 4.",
        ),
        (
            {"gpus_per_node": 3, "nodes": 2, "gpu_type": "a100"},
            "nodes",
            "has 1 node with 3 GPUs of type a100",
        ),
        ({"gpus_per_node": 1, "gpu_type": "h100"}, "gpu_type", "its types are: a100 and v100. Choose one"),
        ({"gpu_type": "a100"}, "gpus_per_node", "requested no GPU"),
        (
            {"gpus_per_node": 1, "partition": "cpu"},
            "gpus_per_node",
            "have no GPUs; 1 were requested. Ask for 0",
        ),
        ({"gpu_type": "a100", "gpus_per_node": 1, "partition": "cpu"}, "gpu_type", "its types are: none"),
        ({"nodes": 3}, "nodes", "The partition 'gpu' has 2 nodes; 3 were requested. Ask for 1 to 2."),
        ({"nodes": 1, "partition": "empty"}, "nodes", "Choose another partition."),
        ({"partition": "gpus"}, "partition", "There is no partition 'gpus'; there are: gpu, cpu and empty."),
        (
            {"minutes": 1441},
            "minutes",
            "lasts at most 1 day, not 1 day 1 minute. Ask for at most 1 day.",
        ),
        ({"image": "nope"}, "image", "There is no image 'nope'; there are: torch. Choose one of these."),
        ({"cpus_per_node": 9}, "cpus_per_node", "at most 8 processors; 9 were requested. Ask for 1 to 8."),
        ({"memory_mb_per_node": 99999}, "memory_mb_per_node", "at most 16000 MiB"),
        ({"cpus_per_node": 7, "nodes": 2}, "nodes", "has 1 node with so many"),
    ],
)
def test_what_can_never_start_is_refused(
    change: dict[str, Any], field: str, sentence: str, images: ImageCatalogue, settings: Settings
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(JobRequest.read(GOOD | change), CLUSTER, images, settings)
    assert sentence in str(caught.value)
    assert caught.value.field == field
    assert caught.value.remedy


def test_what_fits_passes(images: ImageCatalogue, settings: Settings) -> None:
    for change in ({}, {"nodes": 2, "gpus_per_node": 4}, {"partition": "cpu", "minutes": 10**5}):
        check(JobRequest.read(GOOD | change), CLUSTER, images, settings)


def test_sessions_have_the_limit_of_the_site(images: ImageCatalogue, settings: Settings) -> None:
    options = SessionOptions(image="torch", minutes=1500, partition="cpu")
    with pytest.raises(InvalidRequest, match="A session lasts at most 1 day, not 1 day 1 hour"):
        check(options, CLUSTER, images, settings)


def test_sessions_have_the_limit_of_their_partition(images: ImageCatalogue, settings: Settings) -> None:
    limits = {"gpu": PartitionSettings(maximum_minutes=60), "cpu": PartitionSettings(maximum_minutes=2880)}
    site = settings.model_copy(update={"partitions": limits})
    check(SessionOptions(image="torch", minutes=1500, partition="cpu"), CLUSTER, images, site)
    check(SessionOptions(image="torch", minutes=60, partition="gpu"), CLUSTER, images, site)
    with pytest.raises(InvalidRequest, match="A session in partition 'gpu' lasts at most 1 hour, not"):
        check(SessionOptions(image="torch", minutes=120, partition="gpu"), CLUSTER, images, site)
    check(JobRequest.read(GOOD | {"minutes": 120, "partition": "gpu"}), CLUSTER, images, site)
    assert site.longest_session == 2880 and settings.longest_session == settings.sessions.maximum_minutes


def test_an_empty_cluster_is_no_crash(images: ImageCatalogue, settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match="no default partition"):
        check(JobRequest.read(GOOD), Cluster(taken=datetime.now(UTC)), images, settings)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (1, 2048)),
        ({"partition": "cpu"}, (1, 1500)),
        ({"gpus_per_node": 1}, (1, 2000)),
        ({"gpus_per_node": 3, "gpu_type": "a100"}, (6, 12000)),
        ({"gpus_per_node": 4}, (6, 8000)),
        ({"gpus_per_node": 4, "cpus_per_node": 2}, (2, 8000)),
        ({"cpus_per_node": 3, "memory_mb_per_node": 500}, (3, 500)),
    ],
)
def test_processors_and_memory_follow_the_share_of_gpus(
    change: dict[str, Any], expected: tuple[int, int], settings: Settings
) -> None:
    assert share(JobRequest.read(GOOD | change), CLUSTER, settings) == expected


# Errors and images


def test_an_error_has_two_sentences_and_survives_pickling() -> None:
    error = InvalidRequest("This is wrong.", "Do that.", field="name")
    assert str(error) == "This is wrong. Do that."
    assert str(CarmeError("Only this.")) == "Only this."
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.field, copy.code) == (InvalidRequest, str(error), "name", "invalid")


def test_images_are_listed_and_a_broken_manifest_is_reported(images: ImageCatalogue) -> None:
    folder = images.directory
    (folder / "broken.sif").touch()
    (folder / "broken.json").write_text("[1]")
    (folder / "nofile.json").write_text("{}")
    (folder / "sly.sif").touch()
    (folder / "sly.json").write_text('{"title": "x", "file": "/etc/passwd"}')
    assert images.names() == ["broken", "sly", "torch"]
    assert images.get("torch").entry_points == {"lab": "JupyterLab"}
    assert images.get("sly").file == folder / "sly.sif"
    with pytest.raises(CarmeError, match="Build the image again"):
        images.get("broken")
    for name in ("nofile", "../torch", ""):
        with pytest.raises(InvalidRequest, match="there are: broken, sly and torch") as caught:
            images.get(name)
        assert caught.value.field == "image"


def test_a_partition_that_does_not_take_the_account_is_refused_with_the_reason(
    images: ImageCatalogue, settings: Settings
) -> None:
    closed = CLUSTER.partitions[0].model_copy(update={"accounts": ["vision"]})
    cluster = CLUSTER.model_copy(update={"partitions": [closed, *CLUSTER.partitions[1:]]})
    request = JobRequest.read(GOOD | {"partition": closed.name, "account": "teaching"})
    with pytest.raises(InvalidRequest, match="does not take jobs of the account 'teaching'") as caught:
        check(request, cluster, images, settings)
    assert caught.value.field == "partition" and CLUSTER.partitions[1].name in str(caught.value)
    check(request.model_copy(update={"account": "vision"}), cluster, images, settings)
