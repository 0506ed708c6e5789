"""Times a session's start on the idle demo cluster: ours, the stock batchspawner's, and the bare server's.

    python tests/benchmarks/session_start.py --quick
    python tests/benchmarks/session_start.py --json result.json

Every round starts one server of each kind, one after the other and in changing order, in the same image:

ours         a named server of the site's hub, by its REST API
portal       the same by the portal's start form (with --portal)
batchspawner a named server of a second JupyterHub, whose spawner is the stock SlurmSpawner (see stock_hub.py)
bare         our single-user server in the container on a compute node: no hub, no Slurm; the floor
naive        the same for the stock single-user server under batchspawner's wrapper

Each is timed from the request until it is ready (bare ones: until they listen), and until a kernel that was
started in it through the proxy has answered 1+1. Logging in is not part of it. Needs root and the demo.
"""

import argparse
import contextlib
import json
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from hub_api import HubApi
from report import print_table, row, write_json
from stock_hub import FOLDER, StockHub, remove, stock_hub

from carme.validation import NotebookKernel
from demo_site import DemoSite

USER, NODE, IMAGE = "user1", "n1", "base"
ENV = "/opt/carme/env/bin"
PACKAGES = f"{FOLDER}/site-packages"


@dataclass(frozen=True)
class Times:
    """Seconds from the request until the server is ready, and until the first kernel has answered."""

    ready: float
    kernel: float


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="3 rounds instead of 15")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--rounds", type=int, help="rounds")
    options.add_argument("--portal", action="store_true", help="start from the portal's form, too")
    arguments = options.parse_args()
    rounds = arguments.rounds or (3 if arguments.quick else 15)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    site = DemoSite()
    if busy := site.run("head", "squeue", "--noheader").stdout.strip():
        sys.exit(f"session_start: the cluster must be idle, but has jobs. End them first.\n{busy}")
    with contextlib.ExitStack() as open_until_the_end:
        contestants = prepare(site, open_until_the_end, arguments.portal)
        times = contest(site, contestants, rounds)
    rows = judge(times)
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows, rounds=rounds)


def contest(
    site: DemoSite, contestants: dict[str, Callable[[], Times]], rounds: int
) -> dict[str, list[Times]]:
    """All rounds; the first one warms up and does not count."""
    times: dict[str, list[Times]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took = contestants[name]()
            wait_idle(site)
            if turn:
                times[name].append(took)
            print(f"{turn or 'warm-up'} {name}: {took.ready:.3f} s, {took.kernel:.3f} s", file=sys.stderr)
    return times


@dataclass(frozen=True)
class Figures:
    """A duration of all contestants, by their names: medians and 95th percentiles, in seconds."""

    median: dict[str, float]
    p95: dict[str, float]

    @classmethod
    def of(cls, times: dict[str, list[Times]], duration: Callable[[Times], float]) -> "Figures":
        """Those of one duration of each start."""
        everyone = {name: [duration(each) for each in taken] for name, taken in times.items()}
        return cls(
            {name: statistics.median(values) for name, values in everyone.items()},
            {name: round(percentile(values, 95), 3) for name, values in everyone.items()},
        )

    def row_of_p95(self, name: str) -> dict[str, Any]:
        """The row of the 95th percentiles."""
        peers = {"batchspawner": self.p95["batchspawner"], "naive": self.p95["naive"]}
        return row(f"{name}_p95_s", "s", self.p95["ours"], peers=peers, floor=self.p95["bare"])


def judge(times: dict[str, list[Times]]) -> list[dict[str, Any]]:
    """The rows of the report."""
    ready = Figures.of(times, lambda each: each.ready)
    kernel = Figures.of(times, lambda each: each.kernel)
    rows = rows_of_ready(ready.median)
    rows.append(
        row(
            "start_to_kernel_s",
            "s",
            kernel.median["ours"],
            peers={name: kernel.median[name] for name in ("batchspawner", "naive")},
            floor=kernel.median["bare"],
            ratio=round(kernel.median["ours"] / kernel.median["batchspawner"], 3),
        )
    )
    rows += [ready.row_of_p95("start_to_ready"), kernel.row_of_p95("start_to_kernel")]
    if "portal" in times:
        rows.append(row("form_to_ready_s", "s", ready.median["portal"]))
        rows.append(row("form_to_kernel_s", "s", kernel.median["portal"]))
    return rows


def rows_of_ready(ready: dict[str, float]) -> list[dict[str, Any]]:
    """How long until a server can be used, and how much of it is our part."""
    measured, peer, floor = (ready[name] for name in ("ours", "batchspawner", "bare"))
    over, peer_over = measured - floor, peer - floor
    return [
        row(
            "start_to_ready_s",
            "s",
            measured,
            peers={"batchspawner": peer},
            floor=floor,
            aim="over the floor at most 0.8 s and 0.4 of batchspawner's",
            holds=over <= 0.8 and over <= 0.4 * peer_over,
            ratio=round(measured / peer, 3),
        ),
        row(
            "start_overhead_s",
            "s",
            over,
            peers={"batchspawner": peer_over, "batchspawner over its own server": peer - ready["naive"]},
            aim="at most 0.8",
            holds=over <= 0.8,
            ratio=round(over / peer_over, 3),
        ),
        row(
            "server_listens_s",
            "s",
            floor,
            peers={"naive": ready["naive"]},
            aim="under 2.0",
            holds=floor < 2.0,
            ratio=round(floor / ready["naive"], 3),
        ),
    ]


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that at least so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def wait_idle(site: DemoSite) -> None:
    """Wait until Slurm has cleared away the last job."""
    end = time.monotonic() + 60
    while left := site.run("head", "squeue", "--noheader").stdout.strip():
        if time.monotonic() > end:
            raise RuntimeError(f"Jobs do not end: {left}")
        time.sleep(0.2)


# The contestants


def prepare(
    site: DemoSite, open_until_the_end: contextlib.ExitStack, portal: bool
) -> dict[str, Callable[[], Times]]:
    """Everything that is started once; what each contestant does in a round, by its name."""
    enter = open_until_the_end.enter_context
    remove(site)
    enter(packages(site))
    image = json.loads(site.run("head", "cat", f"/srv/carme/images/{IMAGE}.json").stdout)
    file = f"/srv/carme/images/{image['name']}.sif"
    stock_container = f"apptainer -q exec --bind /scratch --env PYTHONPATH={PACKAGES} {file}"
    wrapper = f"{stock_container} {ENV}/python -m batchspawner.singleuser"
    stock = enter(stock_hub(site, wrapper, [f"{ENV}/jupyterhub-singleuser"]))
    bare = enter(bare_servers(site))
    own = contained(site, file)
    contestants = {
        "ours": our_hub(site, open_until_the_end),
        "batchspawner": peer_hub(stock, open_until_the_end),
        "bare": lambda: bare([*own, f"{ENV}/carme-singleuser"]),
        "naive": lambda: bare([*wrapper.split(), f"{ENV}/jupyterhub-singleuser"]),
    }
    if portal:
        contestants["portal"] = our_portal(site, open_until_the_end)
    return contestants


def contained(site: DemoSite, file: str) -> list[str]:
    """How a job starts something in the container, from the node's own copy where there is one."""
    code = "import json, sys; from carme.launch.container import container; "
    code += "from carme.launch.spec import JobSpec; "
    code += "print(json.dumps(container(JobSpec.load(json.loads(sys.argv[1])))))"
    spec = json.dumps({"image": file, "binds": ["/scratch"], "gpus": 0, "workdir": None})
    return json.loads(site.run(NODE, "/opt/carme/venv/bin/python", "-c", code, spec, user=USER).stdout)


@contextlib.contextmanager
def packages(site: DemoSite) -> Iterator[None]:
    """batchspawner where containers see it: beside the image, which stays the same."""
    site.run("head", "install", "-d", PACKAGES)
    try:
        site.run(
            "head", "sh", "-c", f"cp -r /opt/carme/venv/lib/python3*/site-packages/batchspawner {PACKAGES}"
        )
        yield
    finally:
        site.run("head", "rm", "-rf", FOLDER)


def our_hub(site: DemoSite, open_until_the_end: contextlib.ExitStack) -> Callable[[], Times]:
    token = site.run("head", "cat", "/etc/carme/secrets/hub-api-token").stdout.strip()
    certificate = str(site.certificate)
    hub = open_until_the_end.enter_context(HubApi(f"{site.url}/jupyter/", token, certificate))
    visitor = open_until_the_end.enter_context(site.visitor(USER))
    # The hub's own cookie: a browser that was here before has it.
    visitor.http.get(f"{site.url}/jupyter/hub/home")
    hub.add_user(USER)

    def once() -> Times:
        name = new_name()
        begin = time.perf_counter()
        try:
            ready = hub.start(USER, name, {"image": IMAGE, "minutes": 10})
            kernel_answers(visitor.http, f"{site.url}/jupyter/user/{USER}/{name}/", visitor.kernel)
            return Times(ready, time.perf_counter() - begin)
        finally:
            hub.stop(USER, name)

    return once


def our_portal(site: DemoSite, open_until_the_end: contextlib.ExitStack) -> Callable[[], Times]:
    visitor = open_until_the_end.enter_context(site.visitor(USER))

    def once() -> Times:
        begin = time.perf_counter()
        name = visitor.start({"image": IMAGE, "nodes": "1", "gpus_per_node": "0", "minutes": "10"})
        try:
            visitor.wait(name, "ready", timeout=60)
            ready = time.perf_counter() - begin
            kernel_answers(visitor.http, visitor.open(name), visitor.kernel)
            return Times(ready, time.perf_counter() - begin)
        finally:
            visitor.stop(name)
            visitor.wait(name, "ended", timeout=60)

    return once


def peer_hub(stock: StockHub, open_until_the_end: contextlib.ExitStack) -> Callable[[], Times]:
    hub = open_until_the_end.enter_context(HubApi(stock.url, stock.token))
    hub.add_user(USER)
    browser = stock.browser(USER)
    open_until_the_end.callback(browser.close)

    def once() -> Times:
        name = new_name()
        begin = time.perf_counter()
        try:
            ready = hub.start(USER, name, {})
            kernel_answers(
                browser, f"{stock.url}user/{USER}/{name}/", lambda url: NotebookKernel(browser, url, None)
            )
            return Times(ready, time.perf_counter() - begin)
        finally:
            hub.stop(USER, name)

    return once


@contextlib.contextmanager
def bare_servers(site: DemoSite) -> Iterator[Callable[[list[str]], Times]]:
    """A program on a compute node that starts servers in the container alone."""
    token = secrets.token_hex(16)
    address = next(machine.address for machine in site.settings.machines() if machine.name == NODE)
    program = f"/home/{USER}/.carme-benchmark.py"
    code = (Path(__file__).parent / "bare_server.py").read_text()
    site.run(NODE, "tee", program, user=USER, data=code)
    process = site.begin(NODE, "/usr/bin/python3", program, USER, address, token, user=USER)

    def ask(what: list[str] | None) -> Any:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(what) + "\n")
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"The program that starts bare servers on {NODE} has ended.")
        return json.loads(line)

    def once(command: list[str]) -> Times:
        answer = ask(command)
        try:
            if "error" in answer:
                raise RuntimeError(answer["error"])
            begin = time.perf_counter()
            with httpx.Client(
                headers={"Authorization": f"token {token}"}, trust_env=False, timeout=60
            ) as http:
                url = f"http://{address}:{answer['port']}/user/{USER}/bare/"
                kernel_answers(http, url, lambda url: NotebookKernel(http, url, None))
            return Times(answer["seconds"], answer["seconds"] + time.perf_counter() - begin)
        finally:
            ask(None)

    try:
        yield once
    finally:
        if process.stdin:
            process.stdin.close()
        process.wait(30)
        site.run(NODE, "rm", "-f", program, f"/home/{USER}/bare-server.log")


def kernel_answers(http: httpx.Client, server: str, kernel: Callable[[str], NotebookKernel]) -> None:
    """Open a server's page, start a kernel and let it count."""
    page = http.get(f"{server}lab")
    if not page.is_success or not page.url.path.startswith(httpx.URL(server).path):
        raise RuntimeError(f"{server} cannot be opened: {page.status_code} at {page.url}.")
    with kernel(server) as opened:
        cell = opened.run("1+1", timeout=60)
    if cell.output != "2":
        raise RuntimeError(f"The kernel answered {cell.output!r} {cell.error}")


def new_name() -> str:
    return "s" + secrets.token_hex(4)


if __name__ == "__main__":
    main()
