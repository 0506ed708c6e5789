"""What a server may report to the hub, and what it may not."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from carme.jobs import JobState
from carme_spawner.handlers import EndedStart, StartsAtPortal
from carme_spawner.ready import node_names
from patience import HANG

from .conftest import TOKEN, Site, eventually

REPORT = {"port": 40123, "host": "127.0.0.1", "pid": 77}


@pytest.fixture
async def waiting(site: Site) -> Site:
    """A session whose job runs on this host and whose server has not reported yet."""
    site.broker.command = ["sleep", "600"]
    assert (await site.start()).status_code == 202
    await site.runs()
    return site


def spawner(site: Site) -> Any:
    assert site.hub
    [user] = [user for user in site.hub.users.values() if user.name == "ada"]
    return user.spawners["s1"]


async def test_batchspawners_own_handler_is_absent(waiting: Site) -> None:
    body = {"default_url": "/evil", "batch_cancel_cmd": "touch /tmp/evil"}
    response = await waiting.api("POST", "batchspawner", token=waiting.token(100), json=body)
    assert response.status_code == 404
    assert spawner(waiting).default_url == "/lab"


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("/s12345678/lab/tree/a.ipynb", "sessions/s12345678/"),
        ("/s12345678", "sessions/s12345678/"),
        ("/lab", ""),
    ],
)
async def test_the_address_of_an_ended_session_leads_to_its_page(site: Site, path: str, page: str) -> None:
    assert site.hub
    assert (await site.api("POST", "users/ada")).status_code == 201
    [user] = [user for user in site.hub.users.values() if user.name == "ada"]
    headers = {"Authorization": f"token {user.new_api_token()}"}
    hub = f"{site.settings.hub.listen}{site.settings.hub.base_path}hub"
    async with httpx.AsyncClient(timeout=HANG, verify=site.proxys_certificate(), headers=headers) as client:
        answer = await client.get(f"{hub}/user/ada{path}", headers={"Accept": "text/html"})
        assert (answer.status_code, answer.headers["Location"]) == (303, f"{site.settings.site.url}/{page}")
        # By this JupyterLab finds out that its server is gone.
        for part in ("carme/status", "api/kernels"):
            answer = await client.get(f"{hub}/user/ada/s12345678/{part}", headers={"Accept": "*/*"})
            assert answer.status_code == 424


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize(("name", "page"), [("s12345678", "sessions/s12345678/"), ("", "")])
async def test_the_address_of_an_ended_start_leads_to_its_session(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str, page: str, failed: bool
) -> None:
    monkeypatch.setattr(EndedStart, "_accept_token_auth", True)  # instead of a browser's cookie
    assert site.hub
    assert (await site.api("POST", "users/ada")).status_code == 201
    [user] = [user for user in site.hub.users.values() if user.name == "ada"]
    if name:
        user._new_orm_spawner(name, name)
    server = user.spawners[name]
    if failed:
        server._spawn_future = asyncio.get_running_loop().create_future()
        server._spawn_future.set_exception(RuntimeError("no node"))
    headers = {"Authorization": f"token {user.new_api_token()}", "Accept": "text/html"}
    hub = f"{site.settings.hub.listen}{site.settings.hub.base_path}hub"
    async with httpx.AsyncClient(timeout=HANG, verify=site.proxys_certificate(), headers=headers) as client:
        answer = await client.get(f"{hub}/spawn-pending/ada{name and '/'}{name}")
    assert (answer.status_code, answer.headers["Location"]) == (303, f"{site.settings.site.url}/{page}")


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("home", ""),
        ("spawn", ""),
        ("spawn/ada", ""),
        ("spawn/ada/s12345678", "sessions/s12345678/"),
        ("spawn/ada/other?minutes=5", ""),
    ],
)
async def test_the_hubs_own_pages_that_offer_a_start_lead_to_the_portal(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str, page: str, method: str
) -> None:
    # Instead of a browser's cookies.
    monkeypatch.setattr(StartsAtPortal, "_accept_token_auth", True)
    monkeypatch.setattr(StartsAtPortal, "check_xsrf_cookie", lambda _: None)
    assert site.hub
    assert (await site.api("POST", "users/ada")).status_code == 201
    [user] = [user for user in site.hub.users.values() if user.name == "ada"]
    headers = {"Authorization": f"token {user.new_api_token()}", "Accept": "text/html"}
    hub = f"{site.settings.hub.listen}{site.settings.hub.base_path}hub"
    async with httpx.AsyncClient(timeout=HANG, verify=site.proxys_certificate(), headers=headers) as client:
        answer = await client.request(method, f"{hub}/{path}")
    assert (answer.status_code, answer.headers.get("Location")) == (303, f"{site.settings.site.url}/{page}")
    assert not user.running and not site.broker.requests


async def test_a_page_of_the_hub_that_leads_to_the_portal_needs_a_login_first(site: Site) -> None:
    hub = f"{site.settings.hub.listen}{site.settings.hub.base_path}hub"
    async with httpx.AsyncClient(timeout=HANG, verify=site.proxys_certificate()) as client:
        answer = await client.get(f"{hub}/home", headers={"Accept": "text/html"})
    assert answer.status_code == 302 and "/hub/login?next=" in answer.headers["Location"]


@pytest.mark.parametrize(
    ("address", "page"), [("/jupyter/user/ada/s12345678/lab?x=1", "sessions/s12345678/"), ("/jupyter/x", "")]
)
async def test_a_server_that_does_not_answer_leads_to_its_session(
    site: Site, address: str, page: str
) -> None:
    hub = f"{site.settings.hub.listen}{site.settings.hub.base_path}hub"
    async with httpx.AsyncClient(timeout=HANG, verify=site.proxys_certificate()) as client:
        answer = await client.get(f"{hub}/error/503", params={"url": address})
        assert (
            f'<a href="{site.settings.site.url}/{page}">' in answer.text and "from the hub" not in answer.text
        )
        assert "503" in answer.text
        assert "Not Found" in (await client.get(f"{hub}/error/404")).text


async def test_the_servers_own_token_sets_host_and_port(waiting: Site) -> None:
    response = await waiting.report(100, "ready", json=REPORT)
    assert response.status_code == 204
    assert spawner(waiting).address == ("127.0.0.1", 40123)
    # Saying it twice is fine, saying something else is not.
    assert (await waiting.report(100, "ready", json=REPORT)).status_code == 204
    moved = {**REPORT, "port": 40124}
    assert (await waiting.report(100, "ready", json=moved)).status_code == 409


async def test_a_server_that_is_ahead_of_the_broker_has_to_try_again(site: Site) -> None:
    site.broker.command = ["sleep", "600"]
    site.broker.answering.clear()
    starting = asyncio.create_task(site.start())
    await eventually(lambda: 100 in site.broker.requests, "the job is submitted")
    response = await site.report(100, "ready", json=REPORT)
    assert response.status_code == 503
    site.broker.answering.set()
    await starting
    await eventually(lambda: spawner(site).job_id, "the hub knows the job")
    response = await site.report(100, "ready", json=REPORT)
    assert response.status_code == 204


async def test_a_server_that_reports_before_the_hub_knows_its_job_has_to_try_again(site: Site) -> None:
    site.broker.command = None
    await site.start()
    await eventually(lambda: spawner(site).job_id, "the hub knows the job")
    response = await site.report(100, "ready", json=REPORT)
    assert response.status_code == 503 and "the nodes of the session" in response.json()["message"]
    now = datetime.now(UTC)
    await site.broker.change(100, state=JobState.RUNNING, reason="", node_list="localhost", started=now)

    async def taken() -> bool:
        return (await site.report(100, "ready", json=REPORT)).status_code == 204

    await eventually(taken, "the report is taken")


CHANGES: list[dict[str, Any]] = [
    {"job_id": "1"},
    {"identity": "evil"},
    {"port": "40123"},
    {"port": 80},
    {"port": 65536},
    {"port": True},
    {"host": "127.0.0.1/../x"},
    {"host": ""},
    {"host": None},
    {"pid": -1},
    {"pid": "1; true"},
]


async def test_other_values_are_refused(waiting: Site) -> None:
    for change in CHANGES:
        response = await waiting.report(100, "ready", json={**REPORT, **change})
        assert response.status_code == 400, change
        assert next(iter(change)) in response.json()["message"]
    assert spawner(waiting).address is None


async def test_other_bodies_are_refused(waiting: Site) -> None:
    large = b" " * 5000
    for body in (b"", b"[]", b"null", b"{", b"\xff\xfe", b'{"port": 40123}', large):
        response = await waiting.report(100, "ready", content=body)
        assert response.status_code == 400, body
    assert spawner(waiting).address is None


async def test_hosts_outside_the_job_are_refused(waiting: Site) -> None:
    for host in ("192.0.2.7", "example.invalid", "0.0.0.0", "::", "169.254.169.254"):
        response = await waiting.report(100, "ready", json={**REPORT, "host": host})
        assert response.status_code == 400, host
        assert "node of its job" in response.json()["message"]
    assert spawner(waiting).address is None


async def test_the_hubs_own_host_is_refused_whatever_a_header_says(waiting: Site) -> None:
    """Else a session could make the proxy serve what listens on the hub's loopback only."""
    await waiting.broker.change(100, node_list="node[7-8]")
    assert waiting.hub

    def moved() -> bool:
        job = spawner(waiting).watcher.find(100)
        return bool(job and job.node_list == "node[7-8]")

    await eventually(moved, "the hub knows the job's nodes")
    response = await waiting.report(100, "ready", json=REPORT)
    assert response.status_code == 400


async def test_other_tokens_are_refused(waiting: Site) -> None:
    await waiting.start("s2", "bob")
    for token in (TOKEN, "wrong"):
        response = await waiting.api("POST", "carme/ready", token=token, server=100, json=REPORT)
        assert response.status_code == 403
    assert waiting.hub
    own = next(user for user in waiting.hub.users.values() if user.name == "ada").new_api_token()
    response = await waiting.api("POST", "carme/ready", token=own, server=100, json=REPORT)
    assert response.status_code == 403
    # Another user's server speaks for itself only.
    assert (await waiting.report(101, "ready", json=REPORT)).status_code == 204
    assert spawner(waiting).address is None


async def test_a_stolen_token_is_worth_nothing_without_the_servers_certificate(waiting: Site) -> None:
    await waiting.start("s2", "bob")
    for server in (None, 101):  # through the proxy, and from another session
        response = await waiting.api(
            "POST", "carme/ready", token=waiting.token(100), server=server, json=REPORT
        )
        assert response.status_code == 403
    assert spawner(waiting).address is None


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],gpu-a", ["n08", "n09", "n10", "n12", "gpu-a"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_node_lists_are_expanded(short: str, names: list[str]) -> None:
    assert node_names(short) == names
