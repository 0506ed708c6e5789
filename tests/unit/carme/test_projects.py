"""Projects as accounts of Slurm, through the broker's real socket."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from carme.errors import Denied, InvalidRequest, SlurmError
from carme.projects import Grant, ProjectAccount, account_of, changes
from carme.slurm import parsing

VISION = "carme-vision"


@pytest.fixture
def portal(site: Any) -> Any:
    """The broker as the portal sees it."""
    site.act("hub", trusted=True)
    return site


def sent_to_slurm(site: Any) -> list[list[str]]:
    """The changes sent to Slurm, without the queries."""
    calls = [call["arguments"] for call in site.slurm.calls("sacctmgr")]
    return [call[3:] for call in calls if call[3] != "show"]


def grant(**fields: Any) -> Grant:
    return Grant.model_validate({"account": VISION} | fields)


async def test_a_project_becomes_an_account_with_limits_and_members(portal: Any) -> None:
    wanted = grant(members=["ada", "bob"], gpus=4, nodes=2, jobs=3, minutes=90, gpu_hours=100)
    saved = await portal.client.grant(wanted, user="ada")
    assert sent_to_slurm(portal) == [
        ["add", "account", VISION, "cluster=test", f"description={VISION}", "organization=carme-project"],
        [
            *["modify", "account", "where", f"name={VISION}", "cluster=test", "set"],
            *["GrpTRES=gres/gpu=4,node=2", "GrpJobs=3", "MaxWall=90", "GrpTRESMins=gres/gpu=6000"],
        ],
        ["add", "user", "ada", f"account={VISION}", "cluster=test"],
        ["add", "user", "bob", f"account={VISION}", "cluster=test"],
    ]
    assert saved.members == {"ada": [""], "bob": [""]}
    assert (saved.resources, saved.jobs, saved.minutes) == ({"gres/gpu": 4, "node": 2}, 3, 90)
    assert saved.gpu_minutes == 6000
    (line,) = [line for line in portal.audit() if line["action"] == "grant"]
    assert (line["by"], line["user"], line["result"], line["gpus"]) == ("hub", "ada", "ok", 4)
    assert [project.account for project in await portal.client.projects()] == [VISION]


async def test_asking_again_changes_nothing(portal: Any) -> None:
    wanted = grant(members=["ada"], partitions=["gpu"], gpus=4, gpu_types={"a100": 2}, minutes=90)
    await portal.client.grant(wanted, user="ada")
    before = len(sent_to_slurm(portal))
    await portal.client.grant(wanted, user="ada")
    assert len(sent_to_slurm(portal)) == before


async def test_only_what_differs_is_changed_and_limits_can_be_taken_away(portal: Any) -> None:
    first = grant(members=["ada"], gpus=4, gpu_types={"a100": 0}, jobs=3, minutes=90)
    await portal.client.grant(first, user="ada")
    before = len(sent_to_slurm(portal))
    saved = await portal.client.grant(grant(members=["bob"], gpus=2, minutes=90), user="ada")
    where = [f"name={VISION}", "cluster=test"]
    assert sent_to_slurm(portal)[before:] == [
        ["modify", "account", "where", *where, "set", "GrpTRES=gres/gpu=2,gres/gpu:a100=-1", "GrpJobs=-1"],
        *[
            [
                "modify",
                "user",
                "where",
                "name=ada",
                f"account={VISION}",
                "cluster=test",
                "set",
                "MaxSubmitJobs=0",
            ],
            ["delete", "user", "where", "name=ada", f"account={VISION}", "cluster=test"],
            ["add", "user", "bob", f"account={VISION}", "cluster=test"],
        ],
    ]
    assert (saved.members, saved.resources, saved.jobs) == ({"bob": [""]}, {"gres/gpu": 2}, None)


async def test_partitions_are_those_of_the_members(portal: Any) -> None:
    await portal.client.grant(grant(members=["ada"], partitions=["gpu"]), user="ada")
    saved = await portal.client.grant(grant(members=["ada"]), user="ada")
    assert saved.members == {"ada": [""]}
    assert any(call[-1] == "partition=gpu" for call in sent_to_slurm(portal) if call[0] == "delete")


async def test_a_member_who_leaves_keeps_running_jobs_and_starts_no_more(portal: Any) -> None:
    await portal.client.grant(grant(members=["ada", "bob"]), user="ada")
    portal.slurm.jobs = [{"A": 7, "j": "a", "u": "bob", "a": VISION, "P": "gpu", "T": "RUNNING"}]
    saved = await portal.client.grant(grant(members=["ada"]), user="ada")
    assert (sorted(saved.members), saved.stopped) == (["ada", "bob"], ["bob"])
    # Requested again when they have ended, Slurm lets go.
    portal.slurm.jobs = []
    saved = await portal.client.grant(grant(members=["ada"]), user="ada")
    assert saved.members == {"ada": [""]}


async def test_a_member_who_comes_back_may_start_jobs_again(portal: Any) -> None:
    await portal.client.grant(grant(members=["bob"]), user="ada")
    portal.slurm.jobs = [{"A": 7, "j": "a", "u": "bob", "a": VISION, "P": "gpu", "T": "RUNNING"}]
    await portal.client.grant(grant(), user="ada")
    saved = await portal.client.grant(grant(members=["bob"]), user="ada")
    assert (saved.members, saved.stopped) == ({"bob": [""]}, [])


async def test_accounts_that_carme_has_not_made_are_left_alone(portal: Any) -> None:
    foreign = {VISION: {"organization": "physics", "limits": {}, "users": []}}
    (portal.slurm.state / "accounts.json").write_text(json.dumps(foreign))
    (portal.slurm.state / "accounts.json").chmod(0o666)
    with pytest.raises(Denied, match="not made"):
        await portal.client.grant(grant(members=["ada"]), user="ada")
    assert sent_to_slurm(portal) == []
    assert await portal.client.projects() == []


@pytest.mark.parametrize(
    ("fields", "error", "sentence"),
    [
        ({"partitions": ["gpux"]}, InvalidRequest, "no partition 'gpux'; there are: "),
        ({"gpu_types": {"h900": 1}}, InvalidRequest, "no GPUs of type 'h900'; there are: "),
        ({"members": ["hub"]}, Denied, "system account"),
    ],
)
async def test_what_is_not_there_is_refused(portal: Any, fields: Any, error: Any, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        await portal.client.grant(grant(**fields), user="ada")
    assert sent_to_slurm(portal) == []


@pytest.mark.parametrize(
    "account", ["root", "carme", "carme-", "carme-A", "carme-x,root", "carme-x y", "x-carme-x"]
)
def test_other_accounts_cannot_even_be_named(account: str) -> None:
    with pytest.raises(ValidationError, match="carme-"):
        Grant(account=account)


@pytest.mark.parametrize("name", ["", "A", "1x", "x y", "x,root", "-x", "x" * 33, "x\n"])
def test_a_name_of_no_project_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="not a valid name of a project"):
        account_of(name)


async def test_users_may_neither_see_nor_change_projects(site: Any) -> None:
    with pytest.raises(Denied):
        await site.client.grant(grant(members=["ada"], gpus=10_000), user="ada")
    with pytest.raises(Denied):
        await site.client.projects()
    assert site.slurm.calls("sacctmgr") == []


async def test_slurm_away_is_reported(portal: Any) -> None:
    portal.slurm.fail("sacctmgr", "sacctmgr: error: slurm_persist_conn_open: Connection refused")
    with pytest.raises(SlurmError) as caught:
        await portal.client.grant(grant(members=["ada"]), user="ada")
    assert caught.value.code == "slurm-away"


def test_use_is_read_as_24_11_writes_it() -> None:
    use = (Path(__file__).parent / "project_use.txt").read_text()
    associations = (
        f"{VISION}||||gres/gpu=2,node=3|4|1-01:30:00|gres/gpu=600\n{VISION}|ada|gpu||||1-01:30:00|\n"
    )
    found = parsing.project_accounts(associations, use)[VISION]
    assert found.use.model_dump() == {"gpus": 1, "nodes": 1, "jobs": 2, "gpu_hours": 2.5}
    assert (found.minutes, found.jobs, found.gpu_minutes) == (1530, 4, 600)
    assert found.members == {"ada": ["gpu"]}


counts = st.none() | st.integers(0, 100)
grants = st.builds(
    Grant,
    account=st.just(VISION),
    members=st.lists(st.sampled_from(["ada", "bob", "eve"]), unique=True),
    partitions=st.lists(st.sampled_from(["gpu", "cpu"]), unique=True),
    gpus=counts,
    nodes=counts,
    jobs=counts,
    minutes=st.none() | st.integers(1, 100),
    gpu_hours=counts,
    gpu_types=st.dictionaries(st.sampled_from(["a100", "h100"]), st.integers(0, 8)),
)


def after(grant: Grant) -> ProjectAccount:
    """The account once all has been done."""
    resources = {f"gres/gpu:{kind}": count for kind, count in grant.gpu_types.items()}
    resources |= {
        name: count for name, count in (("gres/gpu", grant.gpus), ("node", grant.nodes)) if count is not None
    }
    return ProjectAccount(
        account=grant.account,
        members={user: grant.partitions or [""] for user in grant.members},
        resources=resources,
        jobs=grant.jobs,
        minutes=grant.minutes,
        gpu_minutes=None if grant.gpu_hours is None else grant.gpu_hours * 60,
    )


@given(grants)
def test_a_matching_account_needs_no_change(wanted: Grant) -> None:
    assert changes(wanted, after(wanted)) == []


@given(grants, grants)
def test_limits_come_before_members_and_nobody_is_left_over(before: Grant, wanted: Grant) -> None:
    found = changes(wanted, after(before))
    kinds = [change.kind for change in found]
    assert kinds == sorted(kinds, key=["create", "limit", "remove", "add", "resume"].index)
    members = {(user, part) for user, parts in after(before).members.items() for part in parts}
    for change in found:
        if change.kind == "remove":
            members.remove((change.user, change.partition))
        elif change.kind == "add":
            members.add((change.user, change.partition))
    assert members == {(user, part) for user, parts in after(wanted).members.items() for part in parts}
