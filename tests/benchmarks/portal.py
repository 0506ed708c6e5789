"""The portal with years of a site's data: 1,000 users, 100,000 past and 2,000 current jobs, 500 bookings.

The portal is the real one (`carme-portal serve`) on a real PostgreSQL and Redis, reached by HTTP without
nginx and TLS. The broker is the real one over a Slurm in memory, in its own process, with 2,000 jobs on 250
nodes. Each of 50 clients is another user, opens a page or asks the API, waits for the whole answer, then
looks at it for a while (1 s on average), so that up to 50 requests come in a second; all of it, clients
included, shares the cores. A request costs the clients (aiohttp, which reads HTTP in C) a seventh of a
millisecond. `--pause 0` asks without looking at anything. Rows are `<page or endpoint>_p50_ms`, `_p95_ms` and
`_p99_ms`.
`--files` adds nginx's question whether a file of a notebook's page may pass, as often as all other requests;
its rows are `file_p50_ms` and so on. `--without NAME` runs the portal without one of its own optimisations
(`portal_without.py`), to be compared with a run that has the same other options.
The result also has the queries and the processor time (of the portal's process alone) of one answer, which a
busy machine hardly changes; `--seconds 0` measures these alone.
"""

import argparse
import asyncio
import contextlib
import importlib
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from real_redis import redis
from report import machine, print_table, row, write_json

from real_postgresql import postgresql

USERS, PAST, CURRENT, BOOKINGS, CLIENTS, NODES = 1_000, 100_000, 2_000, 500, 50, 250
AIM_MS = 150.0
YEAR = False  # whether the bookings are those of a year
#: Answers whose processor time is measured.
ALONE = 20
#: Answers; the fewest queries count.
TRIES = 3
#: What the clients ask for, how often, and whether with a login or with a token.
REQUESTS = {
    "dashboard": (4, "page", "/"),
    "jobs": (3, "page", "/jobs/"),
    "jobs_page_4": (1, "page", "/jobs/?page=4"),
    "search": (2, "page", "/jobs/?q=resnet&state=failed"),
    "job": (1, "page", "/jobs/{job}/"),
    "calendar": (2, "page", "/bookings/"),
    "api_jobs": (3, "api", "/api/v1/jobs"),
    "api_search": (2, "api", "/api/v1/jobs?q=bert&since=2024-01-01T00:00:00Z"),
    "api_sessions": (1, "api", "/api/v1/sessions"),
    "api_bookings": (1, "api", "/api/v1/bookings"),
    "api_cluster": (1, "api", "/api/v1/cluster"),
}
#: The same of `--files`.
FILES = {"file": (22, "file", "/internal/enter")}
#: What `--without` leaves out.
OPTIMISATIONS = ("cache", "object-cache", "derived", "entrance")
NAMES = ("train resnet", "train bert", "finetune llama", "notebook", "preprocess", "evaluate")


def write_site(folder: Path, port: int, processes: int = 0) -> None:
    """A site's configuration and secrets."""
    for name in ("secrets", "images", "state"):
        (folder / name).mkdir()
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "secrets/oidc-signing-key").write_bytes(pem)
    for name in ("portal-secret-key", "oidc-client-secret", "hub-api-token"):
        (folder / "secrets" / name).write_text("0" * 64)
    (folder / "images/torch.sif").touch()
    (folder / "images/torch.json").write_text('{"name": "torch", "title": "PyTorch"}')
    (folder / "carme.toml").write_text(
        f"""
[site]
url = "http://127.0.0.1:{port}"
[slurm]
cluster = "bench"
default_partition = "gpu"
[broker]
socket = "{folder}/broker.sock"
[images]
directory = "{folder}/images"
[bookings]
enabled = true
share_percent = 100
[hub]
proxy_url = "http://127.0.0.1:1"
[portal]
listen = "127.0.0.1:{port}"
database = "postgresql://postgres@/postgres?host={folder}/postgres"
redis = "redis+socket://{folder}/redis.sock"
state_directory = "{folder}/state"
requests_per_minute = 1000000
processes = {processes}
[secrets]
directory = "{folder}/secrets"
"""
    )


def serve_broker(socket: Path, ready: Any, ending: Any) -> None:
    """Serve the real broker over a Slurm in memory that is as large as the site."""
    importlib.import_module("django").setup()
    from unit.webui.fake_broker import FakeBroker, make_job

    from carme.broker import protocol
    from carme.broker.peers import Peer
    from carme.garbage import collect_rarely
    from carme.jobs import Cluster, JobState, Node, Partition

    class Broker(FakeBroker):
        async def answer(self, peer: Peer, line: bytes) -> Any:
            if isinstance(protocol.request_adapter.validate_json(line), protocol.GetRunning):
                self.let_begin()
            return await super().answer(peer, line)

        def let_begin(self) -> None:
            """Start one more job: the answers about running jobs differ from each other."""
            job = next(job for job in self.watch.jobs() if job.state == JobState.PENDING)
            began = {"state": JobState.RUNNING, "started": job.submitted, "node_list": names[0]}
            self.queue[job.id] = job.model_copy(update=began)

    collect_rarely()  # as the broker's daemon does
    names = [f"n{number:03}" for number in range(NODES)]
    with Broker(socket, remembers=True) as broker:
        now = datetime.now(UTC).replace(microsecond=0)
        broker.cluster = Cluster(
            taken=broker.cluster.taken,
            partitions=[Partition(name="gpu", default=True, max_minutes=2880, node_names=names)],
            nodes=[Node(name=name, cpus=64, memory_mb=500_000, gpus={"a100": 4}) for name in names],
        )
        for number in range(PAST + 1, PAST + CURRENT + 1):
            runs = number % 8 == 0
            job = make_job(
                number, user=f"user{number % USERS}", name=NAMES[number % len(NAMES)], kind="batch",
                state="RUNNING" if runs else "PENDING", submitted=now, started=now if runs else None,
                node_list=names[number % NODES] if runs else "", minutes_limit=600,
            )  # fmt: skip
            broker.queue[number] = job
        ready.set()
        ending.wait()


def fill(now: datetime) -> list[dict[str, str]]:
    """The data; for each client a login, a token and a job."""
    importlib.import_module("django").setup()
    from django.core.management import call_command
    from django.db import connection

    from carme_webui.accounts.models import User
    from carme_webui.jobs.models import Job

    call_command("migrate", verbosity=0)
    call_command("collectstatic", interactive=False, verbosity=0)
    User.objects.bulk_create(User(username=f"user{number}", password="!") for number in range(USERS))
    users = list(User.objects.order_by("id"))
    Job.store(past_jobs(now))
    store_sessions(users, now)
    store_bookings(users, now)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    found = [client_of(user, number, now) for number, user in enumerate(users[:CLIENTS])]
    counts = sorted(Job.objects.filter(user=user.username).count() for user in users[:CLIENTS])
    print(f"Jobs of a client: {counts[0]} to {counts[-1]}, half of them more than {counts[CLIENTS // 2]}.")
    return found


def past_jobs(now: datetime) -> Iterator[Any]:
    """Jobs of three years, each with an owner: some users have thousands, many a few."""
    from unit.webui.fake_broker import make_job

    chance = random.Random(1)
    endings = ["COMPLETED"] * 7 + ["FAILED", "CANCELLED", "TIMEOUT"]
    for number in range(1, PAST + 1):
        owner = min(USERS - 1, int(chance.paretovariate(0.6)) - 1)
        begun = now - timedelta(days=1095) * (1 - number / PAST)
        yield make_job(
            number, user=f"user{owner}", name=f"{NAMES[number % len(NAMES)]} {number % 97}", kind="batch",
            state=endings[number % len(endings)], submitted=begun, started=begun,
            ended=begun + timedelta(hours=1), exit_code=0,
        )  # fmt: skip


def store_sessions(users: list[Any], now: datetime) -> None:
    """One ended session for each user."""
    from carme_webui.sessions.models import Session

    Session.objects.bulk_create(
        Session(
            name=f"s{number:08}", owner=users[number % USERS], state="ended", ending="stopped", settled=True,
            options={"image": "torch", "minutes": 60, "title": ""}, created=now - timedelta(hours=number),
            changed=now - timedelta(hours=number),
        )
        for number in range(USERS)
    )  # fmt: skip


def store_bookings(users: list[Any], now: datetime) -> None:
    """Approved bookings of the next days, each of one node; or of the last and the next half year."""
    from carme_webui.bookings.models import Booking

    if YEAR:
        each = timedelta(days=365) / BOOKINGS
        starts = [now - timedelta(days=182) + number * each for number in range(BOOKINGS)]
        Booking.objects.bulk_create(
            (
                Booking(
                    owner=users[number % USERS], partition="gpu", gpu_type="a100", gpus_per_node=4,
                    node_names=[f"n{number % NODES:03}"], start=start, end=start + timedelta(hours=6),
                    state="ended" if start + timedelta(hours=6) < now else "approved",
                    cause="finished" if start + timedelta(hours=6) < now else "", reserved=now,
                    title=f"run {number}",
                )
                for number, start in enumerate(starts)
            ),
            batch_size=1000,
        )  # fmt: skip
        return
    Booking.objects.bulk_create(
        Booking(
            owner=users[number % USERS], partition="gpu", gpu_type="a100", gpus_per_node=4,
            node_names=[f"n{number % NODES:03}"], start=now + timedelta(hours=3 * (number % 50)),
            end=now + timedelta(hours=3 * (number % 50) + 3), state="approved", reserved=now,
            title=f"run {number}",
        )
        for number in range(BOOKINGS)
    )  # fmt: skip


def client_of(user: Any, number: int, now: datetime) -> dict[str, str]:
    """A login, a token and a job of a user; `number` is the job where the user has none."""
    from django.conf import settings
    from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY

    from carme_webui.api.models import SCOPES, Token
    from carme_webui.jobs.models import Job

    login = importlib.import_module(settings.SESSION_ENGINE).SessionStore()
    login[SESSION_KEY], login[BACKEND_SESSION_KEY] = str(user.pk), settings.AUTHENTICATION_BACKENDS[0]
    login[HASH_SESSION_KEY] = user.get_session_auth_hash()
    login.create()
    job = Job.objects.filter(user=user.username).order_by("-id").first()
    return {
        "user": user.username,
        "name": settings.SESSION_COOKIE_NAME,
        "cookie": str(login.session_key),
        "token": Token.make(user, "bench", list(SCOPES), now + timedelta(days=1))[1],
        "job": str(job.id if job else number),
    }


def costs() -> dict[str, list[tuple[int, float]]]:
    """Queries and ms of processor time of each page, for the user with most jobs, and for one with none."""
    from django.conf import settings
    from django.db import connection
    from django.test import Client

    from carme_webui.accounts.models import User
    from carme_webui.api.models import SCOPES, Token

    settings.ALLOWED_HOSTS.append("testserver")
    nobody = User.objects.create(username="nobody")
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for user in (User.objects.get(username="user0"), nobody):
        secret = Token.make(user, "count", list(SCOPES), datetime.now(UTC) + timedelta(days=1))[1]
        browser = Client()
        browser.force_login(user, settings.AUTHENTICATION_BACKENDS[0])
        program = Client(headers={"authorization": f"Bearer {secret}"})
        for name, (_weight, kind, path) in REQUESTS.items():
            if kind == "file" or "{" in path:  # nginx's question is not a page
                continue
            asker = browser if kind == "page" else program
            asker.get(path)
            # What all pages share is queried again after some seconds: what is least is the page's own.
            queries = min(_queries(connection, asker, path) for _ in range(TRIES))
            before = time.process_time()
            for _ in range(ALONE):
                asker.get(path)
            spent = (time.process_time() - before) / ALONE * 1000
            found[name].append((queries, spent))
    return found


def _queries(connection: Any, asker: Any, path: str) -> int:
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as requested:
        asker.get(path)
    return len(requested)  # each request begins the list anew


async def load(
    url: str, clients: list[dict[str, str]], seconds: float, pause: float
) -> dict[str, list[float]]:
    """Ask for so many seconds; the time of each answer, in ms."""
    times: dict[str, list[float]] = defaultdict(list)
    names, weights = list(REQUESTS), [weight for weight, _kind, _path in REQUESTS.values()]
    end = time.monotonic() + seconds
    warm = time.monotonic() + seconds / 5

    async def client(number: int, who: dict[str, str]) -> None:
        chance = random.Random(number)
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(60)) as program:
            while (now := time.monotonic()) < end:
                name = chance.choices(names, weights)[0]
                _weight, kind, path = REQUESTS[name]
                begun = time.perf_counter()
                address = path.format(job=who["job"])
                async with program.get(address, headers=_headers(kind, who)) as answer:
                    text = await answer.read()
                if answer.status != (HTTPStatus.NO_CONTENT if kind == "file" else HTTPStatus.OK):
                    raise RuntimeError(f"{path} answered {answer.status}: {text[:300]!r}")
                if now > warm:
                    times[name].append((time.perf_counter() - begun) * 1000)
                await asyncio.sleep(chance.expovariate(1 / pause) if pause else 0)

    await asyncio.gather(*(client(number, who) for number, who in enumerate(clients)))
    return times


def _headers(kind: str, who: dict[str, str]) -> dict[str, str]:
    """What a client sends with a request of a kind."""
    if kind == "api":
        return {"Authorization": f"Bearer {who['token']}"}
    headers = {"Cookie": f"{who['name']}={who['cookie']}"}
    if kind == "file":
        headers["X-Original-URI"] = f"/jupyter/user/{who['user']}/s00000001/static/lab/main.js"
    return headers


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the jobs, and 15 seconds")
    parser.add_argument("--seconds", type=float, help="how long to ask (default: 60)")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds that a client looks at an answer")
    parser.add_argument("--processes", type=int, default=0, help="of the portal (default: as on a site)")
    for name in ("users", "past", "current", "bookings", "nodes"):
        parser.add_argument(f"--{name}", type=int, help=f"how many (default: {globals()[name.upper()]})")
    parser.add_argument("--year", action="store_true", help="bookings of a year in place of some days")
    parser.add_argument("--files", action="store_true", help="ask for files of notebooks' pages as well")
    parser.add_argument(
        "--without", choices=OPTIMISATIONS, action="append", default=[],
        help="leave out one of the portal's own optimisations (entrance: with --files)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    options = parser.parse_args()
    if "entrance" in options.without and not options.files:
        parser.error("--without entrance makes no difference without --files.")
    return options


def main() -> int:
    """Measure and print."""
    options = _options()
    if options.quick:
        globals()["PAST"] = PAST // 10
    for name in ("users", "past", "current", "bookings", "nodes"):
        if getattr(options, name) is not None:
            globals()[name.upper()] = getattr(options, name)
    globals()["YEAR"] = options.year
    globals()["REQUESTS"] = REQUESTS | (FILES if options.files else {})
    seconds = options.seconds if options.seconds is not None else 15.0 if options.quick else 60.0
    port = 32_000 + os.getpid() % 700  # past those that tests beside it take
    folder = Path(tempfile.mkdtemp(prefix="carme-portal-bench-"))
    write_site(folder, port, options.processes)
    os.environ |= {"CARME_CONFIG": str(folder / "carme.toml"), **_settings(options.without)}
    context = multiprocessing.get_context("fork")
    ready, ending = context.Event(), context.Event()
    before = machine()
    try:
        with postgresql(folder), redis(folder):
            broker = context.Process(target=serve_broker, args=(folder / "broker.sock", ready, ending))
            broker.start()
            clients = fill(datetime.now(UTC))
            ready.wait()
            alone = costs()
            # The portal's own command has its own settings.
            program = "django" if options.without else "carme_webui.main"
            server = subprocess.Popen([sys.executable, "-m", program, "serve"])
            try:
                _wait_for(f"http://127.0.0.1:{port}/accounts/login/", server)
                times = (
                    asyncio.run(load(f"http://127.0.0.1:{port}", clients, seconds, options.pause))
                    if seconds
                    else {}
                )
            finally:
                server.terminate()
                server.wait()
                ending.set()
                broker.join()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = _rows(times, alone)
    if seconds:
        rate = sum(map(len, times.values())) / (seconds * 0.8)
        print(f"{rate:.0f} answers a second, load before {before['load']}.")
    print_table(rows)
    if options.json:
        write_json(
            options.json, rows, before=before, quick=options.quick, seconds=seconds, pause=options.pause,
            files=options.files, without=options.without,
        )  # fmt: skip
    return 0


def _settings(without: list[str]) -> dict[str, str]:
    """What the environment of all processes has so that the portal runs without these optimisations."""
    if not without:
        return {"DJANGO_SETTINGS_MODULE": "carme_webui.settings"}
    from portal_without import VARIABLE

    here = str(Path(__file__).resolve().parent)
    return {
        "DJANGO_SETTINGS_MODULE": "portal_without_settings",
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])),
        VARIABLE: ",".join(without),
    }


def _wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == httpx.codes.OK:
                return
        if server.poll() is not None:
            break
        time.sleep(0.1)
    sys.exit("portal.py: The portal does not answer; see above why.")


def _rows(times: dict[str, list[float]], alone: dict[str, list[tuple[int, float]]]) -> list[dict[str, Any]]:
    rows = []
    for name in REQUESTS:
        values = times.get(name, [])
        cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else []
        for part in (50, 95, 99) if cuts else ():
            aimed = {"aim": f"< {AIM_MS:.0f} ms", "holds": cuts[part - 1] < AIM_MS} if part == 95 else {}
            rows.append(row(f"{name}_p{part}_ms", "ms", cuts[part - 1], answers=len(values), **aimed))
        if name in alone:
            (many, spent), (none, least) = alone[name]
            rows += [
                row(f"{name}_queries", "queries", many, peers={"without jobs": none}, aim="no more with data",
                    holds=many <= none + 1),
                row(f"{name}_cpu_ms", "ms", spent, peers={"without jobs": least}),
            ]  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
