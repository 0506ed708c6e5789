"""What Slurm lets a user use: read from its database, offered, and refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from carme.cli.main import main
from carme.config import Settings
from carme.errors import InvalidRequest
from carme.images import ImageCatalogue
from carme.jobs import Access, Association, JobRequest, check, usable
from carme.jobs.limits import Limits
from carme.slurm import parsing
from carme.translation import translated

from .conftest import FakeSlurm, Site

ASSOCIATIONS = (Path(__file__).parent / "associations.txt").read_text()
CONFIG = "AccountingStorageEnforce = associations,limits,qos,safe\n"
ADA = Access(
    user="ada",
    groups=["ada", "staff"],
    enforced=["associations", "limits", "qos"],
    associations=parsing.associations(ASSOCIATIONS, "ada"),
)
PARTITIONS = (
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=physics,vision AllowQos=long,normal Default=YES "
    "MaxTime=UNLIMITED State=UP\n"
    "PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL DenyAccounts=vision DenyQos=low "
    "MaxTime=02:00:00 State=UP\n"
    "PartitionName=staff AllowGroups=staff Hidden=YES State=UP\n"
    "PartitionName=wheel AllowGroups=wheel Hidden=YES State=UP\n"
    "PartitionName=unnamed AllowGroups=ALL Hidden=YES State=UP\n"
    "PartitionName=debug AllowGroups=ALL AllowQos=debug State=UP\n"
)
NODES = "".join(
    f"NodeName={name} CPUTot=8 RealMemory=16000 Gres=gpu:a100:2 State=IDLE Partitions={partitions} \n"
    for name, partitions in (("n1", "gpu,cpu,staff,wheel,unnamed,debug"), ("n2", "gpu,cpu"))
)
CLUSTER = parsing.cluster(NODES, PARTITIONS)


def request(**values: Any) -> JobRequest:
    return JobRequest(**{"name": "a", "kind": "batch", "command": ["a"], "minutes": 30} | values)


def refusal(settings: Settings, access: Access = ADA, **values: Any) -> InvalidRequest:
    images = ImageCatalogue(settings.images.directory)
    with pytest.raises(InvalidRequest) as caught:
        check(request(**values), CLUSTER, images, settings, access)
    return caught.value


def test_associations_are_read_as_the_database_has_them() -> None:
    physics, vision, teaching, closed = ADA.associations
    assert physics == Association(
        account="physics", qos=["long", "low", "normal"], default_qos="normal", default=True
    )
    assert (teaching.partition, vision.default, closed.stopped) == ("cpu", False, True)
    assert ADA.accounts == ["physics", "vision", "teaching"] and ADA.default_account == "physics"
    assert ADA.qos == ["long", "low", "normal"]
    assert parsing.associations(ASSOCIATIONS, "eve") == []
    assert parsing.enforcement(CONFIG) == ["associations", "limits", "qos", "safe"]
    assert parsing.enforcement("AccountingStorageEnforce = none\n") == []


def test_the_quality_of_service_follows_from_the_account() -> None:
    assert ADA.quality("physics", "gpu", None) == "normal" and ADA.quality("physics", "gpu", "long") == "long"
    assert ADA.quality("vision", "gpu", None) == "normal"  # the only one
    assert ADA.quality("teaching", "cpu", None) == "normal"  # Slurm's own
    assert ADA.quality("unknown", "gpu", None) == ""


def test_partitions_are_offered_that_take_one_of_my_accounts() -> None:
    """Hidden ones only where they are limited to me."""
    assert [partition.name for partition in usable(CLUSTER, ADA).partitions] == ["gpu", "cpu", "staff"]
    outsider = ADA.model_copy(update={"groups": ["eve"], "associations": ADA.associations[2:3]})
    assert [partition.name for partition in usable(CLUSTER, outsider).partitions] == ["cpu"]
    # Without accounting and groups only what nobody may see is left out.
    unknown = usable(CLUSTER, Access(user="eve"))
    assert [partition.name for partition in unknown.partitions] == ["gpu", "cpu", "debug"]


@pytest.mark.parametrize(
    ("values", "sentence", "remedy", "field"),
    [
        (
            {"partition": "wheel"},
            "takes jobs of these Unix groups only: wheel; you are in none of them",
            "or one of these partitions: gpu and cpu",
            "partition",
        ),
        ({"partition": "cpu", "account": "vision"}, "jobs of the account 'vision'", "gpu", "partition"),
        ({"account": "teaching"}, "jobs of the account 'teaching'", "cpu", "partition"),
        ({"account": "root"}, "jobs of the account 'root'", "Choose another account", "partition"),
        ({"partition": "cpu", "account": "root"}, "yours are: physics, vision and teaching", "", "account"),
        ({"partition": "cpu", "account": "closed"}, "takes no new jobs of yours", "another", "account"),
        ({"partition": "staff", "account": "teaching"}, "in cpu only, not in 'staff'", "", "partition"),
        ({"qos": "low"}, "quality of service 'low'", "of service: long and normal", "qos"),
        ({"partition": "cpu", "qos": "low"}, "service 'low'", "of service: long and normal", "qos"),
        ({"account": "vision", "qos": "long"}, "service 'long' with the account 'vision'", "", "qos"),
        ({"partition": "debug"}, "quality of service 'normal'", "Choose another account", "partition"),
    ],
)
def test_what_a_partition_excludes_is_refused_with_the_reason(
    settings: Settings, values: dict[str, Any], sentence: str, remedy: str, field: str
) -> None:
    error = refusal(settings, **values)
    assert sentence in error.message and remedy in error.remedy and error.field == field


def test_what_is_allowed_or_not_enforced_passes(settings: Settings) -> None:
    images = ImageCatalogue(settings.images.directory)
    check(request(qos="long"), CLUSTER, images, settings, ADA)
    check(request(partition="staff", account="vision"), CLUSTER, images, settings, ADA)
    lenient = ADA.model_copy(update={"enforced": []})
    check(request(partition="cpu", account="root"), CLUSTER, images, settings, lenient)
    check(request(account="physics"), CLUSTER, images, settings)


def test_limits_exclude_what_can_never_start(settings: Settings) -> None:
    """The first holder that sets a limit counts: a quality of service before the user and the account."""
    limits = [
        Limits(account="physics", user="ada", minutes=20),
        Limits(account="physics", parent="root", resources={"gres/gpu": (2, 0)}, minutes=10),
        Limits(account="root", resources={"node": (1, 0)}),
        Limits(qos="long", minutes=600, each={"gres/gpu": 3}),
    ]
    access = ADA.model_copy(update={"limits": limits})
    error = refusal(settings, access)
    assert error.message == "Slurm's accounting allows ada at most 20 minutes for one job."
    assert error.field == "minutes" and "another account" in error.remedy
    error = refusal(settings, access, minutes=20, nodes=2, gpus_per_node=2)
    assert error.message == "Slurm's accounting allows account physics at most 2 GPUs."
    assert refusal(settings, access, minutes=20, nodes=2).field == "nodes"
    images = ImageCatalogue(settings.images.directory)
    check(request(minutes=20), CLUSTER, images, settings, access)
    check(request(minutes=500, qos="long"), CLUSTER, images, settings, access)
    check(request(), CLUSTER, images, settings, access.model_copy(update={"enforced": ["associations"]}))


def write(slurm: FakeSlurm) -> None:
    (slurm.state / "associations").write_text(ASSOCIATIONS)
    (slurm.state / "config").write_text(CONFIG)
    (slurm.state / "partitions").write_text(PARTITIONS)
    (slurm.state / "nodes").write_text(NODES)


@pytest.fixture
def accounted(slurm: FakeSlurm) -> None:
    """Slurm has accounting, and enforces it."""
    write(slurm)


async def test_the_broker_asks_once_and_sends_what_is_requested(accounted: None, site: Site) -> None:
    access = await site.client.access()
    assert access.associations == ADA.associations and "limits" in access.enforced
    assert access.accounts == ["physics", "vision", "teaching"]
    await site.client.submit(request(account="vision", qos="normal"))
    submitted = site.slurm.calls("sbatch")[-1]["arguments"]
    assert "--account=vision" in submitted and "--qos=normal" in submitted
    with pytest.raises(InvalidRequest, match="does not take jobs of the account 'teaching'"):
        await site.client.submit(request(account="teaching"))
    requested = [call for call in site.slurm.calls("sacctmgr") if "withassoc" in call["arguments"]]
    assert len(requested) == 1 and {"name=ada", "cluster=test"} <= set(requested[0]["arguments"])
    audited = next(line for line in site.audit() if line["action"] == "submit")
    assert (audited["account"], audited["qos"]) == ("vision", "normal")


async def test_without_an_answer_of_the_database_slurm_decides(site: Site) -> None:
    site.slurm.fail("sacctmgr", "sacctmgr: error: Sending PersistInit msg: Connection refused")
    assert (await site.client.access()).associations == []
    await site.client.submit(request(account="vision"))
    assert "--account=vision" in site.slurm.calls("sbatch")[-1]["arguments"]


async def test_the_command_line_shows_accounts_and_hidden_partitions(
    accounted: None, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client of the command line blocks, so it runs beside the broker."""
    import asyncio

    from carme.broker import BrokerClient

    monkeypatch.setattr("carme.cli.cluster.BrokerClient", lambda: BrokerClient(site.settings.broker.socket))
    monkeypatch.setattr("carme.cli.portal.is_remote", lambda: False)
    # This host's groups are not Slurm's.
    monkeypatch.setattr("carme.slurm.account.UnixAccount.groups", lambda self: ["staff"])
    assert await asyncio.to_thread(main, ["accounts"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["physics*", "all", "long,", "low,", "normal*"]
    assert rows[3][:2] == ["teaching", "cpu"] and rows[4][-3:] == ["no", "new", "jobs"]
    assert await asyncio.to_thread(main, ["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["partitions"]
    assert [partition["name"] for partition in shown] == ["gpu", "cpu", "staff", "debug"]


def test_the_refusals_have_german_sentences(settings: Settings) -> None:
    refused: tuple[dict[str, Any], ...] = (
        {"partition": "wheel"},
        {"account": "root"},
        {"partition": "cpu", "account": "root"},
        {"partition": "cpu", "account": "closed"},
        {"partition": "staff", "account": "teaching"},
        {"partition": "cpu", "qos": "low"},
        {"account": "vision", "qos": "long"},
    )
    for values in refused:
        error = refusal(settings, **values)
        for sentence in (error.message, error.remedy):
            assert translated(sentence, "de") != sentence, sentence
