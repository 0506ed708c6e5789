"""What admins do through the portal: nodes and new users, on the broker's real socket."""

import json
from typing import Any

import pytest

from carme.errors import CarmeError, Denied, InvalidRequest


@pytest.fixture
def settings(settings: Any) -> Any:
    return settings.model_copy(
        update={"slurm": settings.slurm.model_copy(update={"default_account": "carme"})}
    )


@pytest.fixture
def portal(site: Any) -> Any:
    """The broker as the portal sees it."""
    site.act("hub", trusted=True)
    return site


@pytest.fixture
def default(slurm: Any) -> None:
    """The account for all who are in no other one."""
    file = slurm.state / "accounts.json"
    file.write_text(json.dumps({"carme": {"organization": "carme", "limits": {}, "users": []}}))
    file.chmod(0o666)


def updates(site: Any) -> list[list[str]]:
    calls = [call["arguments"] for call in site.slurm.calls("scontrol")]
    return [call[1:] for call in calls if call[0] == "update"]


async def test_a_node_is_drained_with_its_reason_and_resumed(portal: Any) -> None:
    await portal.client.node("n1", True, user="root1", reason="fan  broken; see #7 $(reboot)")
    await portal.client.node("n1", False, user="root1")
    assert updates(portal) == [
        ["NodeName=n1", "State=DRAIN", "Reason=fan broken; see #7 $(reboot)"],
        ["NodeName=n1", "State=RESUME"],
    ]
    lines = [line for line in portal.audit() if line["action"] == "node"]
    assert [(line["user"], line["name"], line["drain"], line["result"]) for line in lines] == [
        ("root1", "n1", True, "ok"),
        ("root1", "n1", False, "ok"),
    ]


@pytest.mark.parametrize(
    ("name", "reason", "sentence"),
    [
        ("n77", "x", "no node 'n77'. Known are: n1"),
        ("n1", "", "for a reason"),
        ("n1", "x State=DOWN", "without '='"),
        ("n1", "x\u202ey", "one line"),
        ("n1 State=DOWN", "x", "letters, digits"),
        ("n1", "x" * 201, "200"),
    ],
)
async def test_what_cannot_be_is_refused(portal: Any, name: str, reason: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        await portal.client.node(name, True, user="root1", reason=reason)
    assert updates(portal) == []


async def test_users_may_not(site: Any) -> None:
    with pytest.raises(Denied):
        await site.client.node("n1", True, user="ada", reason="mine")
    with pytest.raises(Denied):
        await site.client.enrol("ada", user="ada")
    assert updates(site) == []


async def test_a_new_user_gets_an_association_and_nothing_twice(portal: Any, default: None) -> None:
    assert await portal.client.enrol("ada", user="root1") == ["added to the account carme in Slurm"]
    assert await portal.client.enrol("ada", user="root1") == []
    calls = [call["arguments"][3:] for call in portal.slurm.calls("sacctmgr")]
    assert [call for call in calls if call[0] == "add"] == [
        ["add", "user", "ada", "account=carme", "cluster=test"]
    ]


async def test_system_accounts_are_not_enrolled(portal: Any) -> None:
    with pytest.raises(Denied, match="system account"):
        await portal.client.enrol("hub", user="root1")


async def test_a_home_that_cannot_be_made_is_said(portal: Any, default: None) -> None:
    # bob's home is in a place that there is not.
    with pytest.raises(CarmeError, match=r"/nonexistent|systemctl"):
        await portal.client.enrol("bob", user="root1")
