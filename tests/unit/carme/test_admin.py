"""What admins do through the portal: nodes and new users, on the broker's real socket."""

import json
from pathlib import Path
from typing import Any

import pytest

from carme.config import QuotaSettings
from carme.errors import CarmeError, Denied, InvalidRequest


@pytest.fixture
def quotas() -> dict[Path, QuotaSettings]:
    return {}


@pytest.fixture
def settings(settings: Any, quotas: Any) -> Any:
    slurm = settings.slurm.model_copy(update={"default_account": "carme"})
    return settings.model_copy(update={"slurm": slurm, "quotas": quotas})


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
        ("n77", "x", "no node 'n77'. Choose from: n1"),
        ("n1", "", "needs a reason"),
        ("n1", "x State=DOWN", "without '='"),
        ("n1", "x\u202ey", "one line"),
        ("n1 State=DOWN", "x", "letters, digits"),
        ("n1", "x" * 201, "200"),
    ],
)
async def test_wrong_nodes_and_names_are_refused(portal: Any, name: str, reason: str, sentence: str) -> None:
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


async def test_a_home_that_cannot_be_made_is_reported(portal: Any, default: None) -> None:
    # bob's home is in a place that there is not.
    with pytest.raises(CarmeError, match=r"/nonexistent|systemctl"):
        await portal.client.enrol("bob", user="root1")


class Systemd:
    """Stands in for systemd, which tests do not have: notes what is started; fails when a test says so."""

    def __init__(self, programs: Path) -> None:
        self._log, self._failure = programs / "state/units", programs / "state/unit-failure"
        self._log.touch()
        self._log.chmod(0o666)
        program = programs / "systemctl"
        fail = f"if [ -e {self._failure} ]; then cat {self._failure} >&2; exit 1; fi"
        program.write_text(f'#!/bin/sh\necho "$*" >> {self._log}\n{fail}\n')
        program.chmod(0o755)

    def requests(self) -> list[str]:
        return self._log.read_text().splitlines()

    def fail(self, words: str) -> None:
        self._failure.write_text(words)


@pytest.fixture
def systemd(slurm: Any) -> Systemd:
    return Systemd(slurm.folder)


GIVEN = {Path("/home"): QuotaSettings(limit_gb=100), Path("/scratch"): QuotaSettings(limit_gb=500)}


@pytest.mark.parametrize("quotas", [{}, GIVEN])
async def test_quotas_are_set_at_each_enrolment(
    portal: Any, systemd: Systemd, default: None, quotas: Any
) -> None:
    message = ["saw to the quotas on /home and /scratch"] if quotas else []
    for expected in (["added to the account carme in Slurm"], []):
        assert await portal.client.enrol("ada", user="root1") == expected + message
    assert systemd.requests() == (["start carme-quota@ada.service"] * 2 if quotas else [])
    systemd.fail("Job for carme-quota@ada.service failed.")
    if quotas:
        with pytest.raises(CarmeError, match=r"quotas on /home and /scratch cannot be set.*journalctl"):
            await portal.client.enrol("ada", user="root1")
