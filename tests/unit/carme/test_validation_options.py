"""What the check of a site starts its session with."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from carme.cli import main, validate
from carme.config import Settings
from carme.errors import BrokerUnavailable, CarmeError, InvalidRequest
from carme.jobs import Access, Cluster, Node, Partition
from carme.jobs.access import Association
from carme.validation import checks
from carme.validation.options import CheckOptions, SessionSize, session_size


def settings(**slurm: Any) -> Settings:
    return Settings.model_validate(
        {"site": {"url": "https://carme.example.org"}, "slurm": {"cluster": "test"} | slurm}
    )


def node(name: str, gpus: int = 0, **values: Any) -> Node:
    return Node(name=name, cpus=8, memory_mb=1000, gpus={"a100": gpus} if gpus else {}, **values)


CLUSTER = Cluster(
    taken=datetime.now(UTC),
    partitions=[
        Partition(name="cpu", default=True, node_names=["c1"]),
        Partition(name="big", node_names=["g1", "g2", "g3"], accounts=["physics"]),
        Partition(name="old", node_names=["o1"]),
    ],
    nodes=[
        node("c1"),
        node("g1", 4),
        node("g2", 1),
        node("g3", 4, available=False),
        node("o1", available=False),
    ],
)
ADA = Access(
    user="ada", associations=[Association(account="physics", default=True)], enforced=["associations"]
)


@pytest.mark.parametrize(
    ("wanted", "slurm", "size"),
    [
        (CheckOptions(), {}, SessionSize("cpu", None, 1, 0)),
        (CheckOptions(), {"default_partition": "big"}, SessionSize("big", None, 2, 1)),
        (CheckOptions(), {"default_partition": "old"}, SessionSize("cpu", None, 1, 0)),
        (CheckOptions(), {"default_account": "carme"}, SessionSize("cpu", "physics", 1, 0)),
        (CheckOptions(partition="big", nodes=1), {}, SessionSize("big", None, 1, 2)),
        (CheckOptions(partition="big", gpus_per_node=0), {}, SessionSize("big", None, 2, 0)),
    ],
)
def test_the_session_follows_from_what_the_site_has(
    wanted: CheckOptions, slurm: dict[str, Any], size: SessionSize
) -> None:
    assert session_size(wanted, CLUSTER, ADA, settings(**slurm)) == size


def test_nodes_that_are_switched_off_count_only_where_no_other_is_at_work() -> None:
    off = {"state": "IDLE+CLOUD+POWERED_DOWN"}
    big = [node("g1", 1), node("g2", 4, **off), node("g3", 4, **off)]
    for nodes, size in ((big, (1, 1)), (big[1:], (2, 2))):
        found = session_size(
            CheckOptions(partition="big"), CLUSTER.model_copy(update={"nodes": nodes}), ADA, settings()
        )
        assert (found.nodes, found.gpus_per_node) == size


def test_without_accounting_slurm_chooses_the_account() -> None:
    assert session_size(CheckOptions(), CLUSTER, Access(user="ada"), settings()) == SessionSize(
        "cpu", None, 1, 0
    )


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (CheckOptions(partition="nix"), "There is no partition 'nix'; there are: cpu, big, old and down."),
        (CheckOptions(partition="old"), "The partition 'old' has no node at work."),
        (CheckOptions(partition="down"), "The partition 'down' starts no jobs: its state is DOWN."),
        (
            CheckOptions(partition="cpu", account="bio"),
            "You may not use the account 'bio'; yours are: physics.",
        ),
        (CheckOptions(account="bio"), "You may not use the account 'bio'; yours are: physics."),
    ],
)
def test_wrong_options_are_refused_with_their_cause(wanted: CheckOptions, sentence: str) -> None:
    down = [*CLUSTER.partitions, Partition(name="down", state="DOWN", node_names=["c1"])]
    with pytest.raises(InvalidRequest) as refused:
        session_size(wanted, CLUSTER.model_copy(update={"partitions": down}), ADA, settings())
    assert refused.value.message == sentence


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        ([2], "No partition that has a node at work takes jobs of ada."),
        ([], "No partition takes jobs of ada."),
    ],
)
def test_without_a_partition_that_is_of_use_the_cause_is_named(there: list[int], sentence: str) -> None:
    cluster = CLUSTER.model_copy(update={"partitions": [CLUSTER.partitions[number] for number in there]})
    with pytest.raises(InvalidRequest) as refused:
        session_size(CheckOptions(), cluster, ADA, settings())
    assert refused.value.message == sentence


@pytest.mark.parametrize(("nodes", "gpus"), [(0, None), (-2, None), (None, -1)])
def test_no_session_has_such_a_size(nodes: int | None, gpus: int | None) -> None:
    with pytest.raises(InvalidRequest, match="1 node or more, and 0 GPUs or more"):
        CheckOptions(nodes=nodes, gpus_per_node=gpus)


class Broker:
    """A broker that says whose access it was requested for, or does not answer."""

    def __init__(self, works: bool) -> None:
        self.works = works
        self.users: list[str | None] = []
        self.earlier: list[Cluster] = []  # what it reports first

    def cluster(self) -> Cluster:
        if not self.works:
            raise BrokerUnavailable("The broker does not answer.")
        return self.earlier.pop(0) if self.earlier else CLUSTER

    def access(self, user: str | None = None) -> Access:
        self.users.append(user)
        return ADA


@pytest.mark.parametrize(
    ("works", "more", "detail", "remedy", "users"),
    [
        (True, (), "3 nodes", "", ["ada"]),
        (True, ("--partition", "nix"), "There is no partition 'nix'", "", ["ada"]),
        (False, (), "The broker does not answer.", "systemctl status carme-broker", []),
    ],
)
def test_the_verdict_names_what_the_broker_answers(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    works: bool,
    more: tuple[str, ...],
    detail: str,
    remedy: str,
    users: list[str],
) -> None:
    broker = Broker(works)
    for module in (validate, checks):
        monkeypatch.setattr(module, "BrokerClient", lambda: broker)
    monkeypatch.setattr(validate, "load", settings)

    def refuse(*_: object) -> None:
        raise CarmeError("The portal is not there.")

    monkeypatch.setattr(checks.Visitor, "login", refuse)
    (tmp_path / "password").write_text("secret\n")
    words = ["validate", "--json", "--user", "ada", "--password-file", str(tmp_path / "password"), *more]
    assert main(words) == 1
    first, login, *_ = json.loads(capsys.readouterr().out)["checks"]
    assert first["name"] == "broker" and detail in first["detail"] and first["remedy"].startswith(remedy)
    assert first["ok"] is (works and not more) and (login["ok"] is None) is not first["ok"]
    assert broker.users == users


@pytest.mark.parametrize(
    ("state", "is_coming"),
    [
        *((state, True) for state in ("UNKNOWN", "UNKNOWN+NOT_RESPONDING", "IDLE+NOT_RESPONDING", "IDLE*")),
        *((state, False) for state in ("DOWN", "DOWN*", "DOWN+NOT_RESPONDING", "IDLE+DRAIN")),
    ],
)
def test_the_check_waits_for_nodes_that_have_not_registered(
    monkeypatch: pytest.MonkeyPatch, state: str, is_coming: bool
) -> None:
    broker = Broker(works=True)
    unheard = [node.model_copy(update={"available": False, "state": state}) for node in CLUSTER.nodes]
    broker.earlier = [CLUSTER.model_copy(update={"nodes": unheard})] * 2
    monkeypatch.setattr(checks, "BrokerClient", lambda: broker)
    validation = checks.Validation(
        url="https://carme.example.org",
        certificate=None,
        account=checks.Account("ada", "secret"),
        options=lambda: {"nodes": "3", "gpus_per_node": "1"},
        training=False,
        stranger=None,
        notify=lambda _line: None,
    )
    if is_coming:
        assert validation._broker() == "3 nodes with 5 GPUs are available."
    else:
        with pytest.raises(checks.Failed, match="0 nodes are available and 3 are needed"):
            validation._broker()
