"""What the check of a site starts its session with."""

from datetime import UTC, datetime
from typing import Any

import pytest

from carme.config import Settings
from carme.errors import InvalidRequest
from carme.jobs import Access, Cluster, Node, Partition
from carme.jobs.access import Association
from carme.validation.options import SessionSize, Wanted, session_size


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
        (Wanted(), {}, SessionSize("cpu", None, 1, 0)),
        (Wanted(), {"default_partition": "big"}, SessionSize("big", None, 2, 1)),
        (Wanted(), {"default_partition": "old"}, SessionSize("cpu", None, 1, 0)),
        (Wanted(), {"default_account": "carme"}, SessionSize("cpu", "physics", 1, 0)),
        (Wanted(partition="big", nodes=1), {}, SessionSize("big", None, 1, 2)),
        (Wanted(partition="big", gpus_per_node=0), {}, SessionSize("big", None, 2, 0)),
    ],
)
def test_the_session_follows_from_what_the_site_has(
    wanted: Wanted, slurm: dict[str, Any], size: SessionSize
) -> None:
    assert session_size(wanted, CLUSTER, ADA, settings(**slurm)) == size


def test_without_accounting_slurm_chooses_the_account() -> None:
    assert session_size(Wanted(), CLUSTER, Access(user="ada"), settings()) == SessionSize("cpu", None, 1, 0)


@pytest.mark.parametrize("wanted", [Wanted(partition="old"), Wanted(partition="none"), Wanted(account="bio")])
def test_what_cannot_be_is_refused_by_name(wanted: Wanted) -> None:
    with pytest.raises(InvalidRequest, match=r"jobs of ada.* and has a node at work"):
        session_size(wanted, CLUSTER, ADA, settings())
