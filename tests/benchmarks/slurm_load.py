"""What sessions cost Slurm and the hub: 5, 50 and 500 running servers, ours and the stock batchspawner's.

    python tests/benchmarks/slurm_load.py --quick
    python tests/benchmarks/slurm_load.py --json result.json

Real: the demo's slurmctld, slurmd and accounting, a Slurm job for each server, the site's hub, broker,
proxy and portal, and for the peer a second JupyterHub with the stock SlurmSpawner at its defaults (see
stock_hub.py). Not real: what the jobs run, a small program that reports and answers as a single-user server
does (see stand_in.py), and the size of the nodes, which claim more cores and memory than there are. The
servers belong to 50 accounts. Needs root and the demo.

Counted over some minutes in which nobody starts or stops anything: every RPC that slurmctld got (`sdiag`),
and processor time and memory of hub and broker with the commands that they run. Then a job is cancelled in
Slurm, and we time until broker, hub and portal show it.
"""

import argparse
import contextlib
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crowd import ACCOUNTS, STAND_IN, cancel_jobs, crowd, disperse, jobs
from faults.views import Views
from hub_api import HubApi
from report import print_table, row, write_json
from stock_hub import UNIT, remove, stock_hub

from demo_site import DemoSite, wait_until

USER = "user1"
AT_ONCE = 8
#: Seconds after the last start until the counting begins.
SETTLE = 10


@dataclass(frozen=True)
class Load:
    """What so many servers cost: RPCs and processor seconds a minute, MiB, seconds until a stop is seen.

    `slurm` are the seconds after which the job of that stop was over in Slurm's own queue.
    """

    servers: int
    rpcs: float
    kinds: dict[str, int]
    cpu: float
    memory: float
    stop: dict[str, float]
    slurm: float = 0.0


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="5 and 50 servers, 30 s each")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--counts", type=int, nargs="+", metavar="N", help="numbers of servers, ascending")
    options.add_argument("--seconds", type=int, help="how long is counted (multiples of 30; default 180)")
    options.add_argument("--only", choices=("ours", "batchspawner"), help="measure one of the two")
    arguments = options.parse_args()
    counts = arguments.counts or ([5, 50] if arguments.quick else [5, 50, 500])
    seconds = arguments.seconds or (30 if arguments.quick else 180)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    site = DemoSite()
    remove(site)
    disperse(site)
    if busy := site.run("head", "squeue", "--noheader").stdout.strip():
        sys.exit(f"slurm_load: the cluster must be idle, but has jobs. End them first.\n{busy}")
    loads: dict[str, list[Load]] = {"ours": [], "batchspawner": []}
    with crowd(site):
        if arguments.only != "batchspawner":
            loads["ours"] = carme(site, counts, seconds)
        if arguments.only != "ours":
            loads["batchspawner"] = batchspawner(site, counts, seconds)
    rows = judge(loads)
    print_table(rows)
    if arguments.json:
        kinds = {who: {load.servers: load.kinds for load in of} for who, of in loads.items()}
        write_json(arguments.json, rows, seconds=seconds, rpcs_by_kind=kinds)


def judge(loads: dict[str, list[Load]]) -> list[dict[str, Any]]:
    """The rows of the report."""
    rows = []
    by_count = {who: {load.servers: load for load in of} for who, of in loads.items()}
    counts = sorted({count for of in by_count.values() for count in of})
    fewest = by_count["ours"].get(counts[0])

    def figures(name: str, unit: str, count: int, of: Callable[[Load], float], **aim: Any) -> None:
        measured, peer = by_count["ours"].get(count), by_count["batchspawner"].get(count)
        rows.append(
            row(
                f"{name}_{count}",
                unit,
                of(measured) if measured else None,
                peers={"batchspawner": of(peer) if peer else None},
                **aim if measured else {},
            )
        )

    for count in counts:
        measured = by_count["ours"].get(count)
        rpcs = measured.rpcs if measured else 0.0
        independent = fewest is None or rpcs <= 1.1 * fewest.rpcs + 2
        aim = "under 70, and not more for more users"
        figures(
            "slurmctld_rpcs_per_minute",
            "1/min",
            count,
            lambda load: load.rpcs,
            aim=aim,
            holds=rpcs < 70 and independent,
        )
    for count in counts:
        figures("hub_cpu_per_minute", "s/min", count, lambda load: load.cpu)
    for count in counts:
        figures("hub_memory_per_server", "MiB", count, lambda load: load.memory)
    for count in counts:
        measured = by_count["ours"].get(count)
        slowest = max(measured.stop.values()) if measured else 0.0
        more = {"each": measured.stop} if measured else {}
        figures(
            "stop_seen_after",
            "s",
            count,
            lambda load: max(load.stop.values()),
            floor=measured.slurm if measured else None,
            aim="under 2",
            holds=measured is not None and slowest < 2,
            **more,
        )
    return rows


# The two sides


def carme(site: DemoSite, counts: list[int], seconds: int) -> list[Load]:
    """The site's own hub."""
    token = site.run("head", "cat", "/etc/carme/secrets/hub-api-token").stdout.strip()
    with HubApi(f"{site.url}/jupyter/", token, str(site.certificate)) as hub:
        for user in ACCOUNTS:
            hub.add_user(user)
        try:
            units = ("carme-hub", "carme-broker")
            options = {"image": "base", "minutes": 120}
            return grow(site, hub, units, options, counts, seconds, lambda: stop_seen_by_us(site))
        finally:
            cancel_jobs(site)
            wait_until("the crowd's jobs are over", lambda: not jobs(site), timeout=180)
            for user in ACCOUNTS:
                hub.remove_user(user)


def batchspawner(site: DemoSite, counts: list[int], seconds: int) -> list[Load]:
    """The peer; our own broker, which asks Slurm too, rests meanwhile."""
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(site.run, "head", "systemctl", "start", "carme-broker", "carme-hub")
        site.run("head", "systemctl", "stop", "carme-hub", "carme-broker")
        wrapper = f"/usr/bin/python3 -I -S {STAND_IN} batchspawner"
        stock = at_the_end.enter_context(stock_hub(site, wrapper, ["jupyterhub-singleuser"]))
        hub = at_the_end.enter_context(HubApi(stock.url, stock.token))
        for user in ACCOUNTS:
            hub.add_user(user)
        try:
            return grow(site, hub, (UNIT,), {}, counts, seconds, lambda: stop_seen_by_hub(site, hub))
        finally:
            site.run("head", "systemctl", "stop", UNIT)
            cancel_jobs(site)
            wait_until("the crowd's jobs are over", lambda: not jobs(site), timeout=180)


def grow(
    site: DemoSite,
    hub: HubApi,
    units: tuple[str, ...],
    options: dict[str, Any],
    counts: list[int],
    seconds: int,
    stop_seen: Callable[[], dict[str, float]],
) -> list[Load]:
    """Start more and more servers; what each number of them costs."""
    loads: list[Load] = []
    _, empty = usage(site, units)
    running = 0
    for count in counts:
        begin = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            # All are waited for, and the first failure is reported.
            list(pool.map(lambda number: start(hub, number, options), range(running, count)))
        running = count
        print(f"{count} servers run after {time.monotonic() - begin:.0f} s more", file=sys.stderr, flush=True)
        time.sleep(SETTLE)
        site.run("head", "sdiag", "--reset")
        cpu, _ = usage(site, units)
        begin = time.monotonic()
        time.sleep(seconds)
        kinds = rpcs(site)
        minutes = (time.monotonic() - begin) / 60
        cpu_then, memory = usage(site, units)
        seen = stop_seen()
        loads.append(
            Load(
                count,
                sum(kinds.values()) / minutes,
                kinds,
                (cpu_then - cpu) / minutes,
                (memory - empty) / count,
                seen,
                seen.pop("slurm", 0.0),
            )
        )
        print(f"  {loads[-1]}", file=sys.stderr, flush=True)
        if (ready := hub.ready()) < count - 1:
            raise RuntimeError(f"Only {ready} of {count} servers are still ready.")
    return loads


def start(hub: HubApi, number: int, options: dict[str, Any]) -> None:
    """The server with this number; each account gets its turn."""
    hub.start(ACCOUNTS[number % len(ACCOUNTS)], f"s{number:08}", options)


# What is read


def rpcs(site: DemoSite) -> dict[str, int]:
    """The requests that slurmctld got since the last reset, by kind; our own do not count."""
    output = site.run("head", "sdiag").stdout
    table = output.partition("statistics by message type")[2].partition("statistics by user")[0]
    found = {name: int(count) for name, count in re.findall(r"(\w+)\s+\(\s*\d+\) count:(\d+)", table)}
    found.pop("REQUEST_STATS_INFO", None)
    return found


def usage(site: DemoSite, units: tuple[str, ...]) -> tuple[float, float]:
    """Processor seconds of services, with those of the commands that they ran, and MiB of memory."""
    cpu = memory = 0.0
    for unit in units:
        pid = site.run("head", "systemctl", "show", "--property=MainPID", "--value", unit).stdout.strip()
        stat = site.run("head", "cat", f"/proc/{pid}/stat").stdout.rpartition(")")[2].split()
        cpu += sum(int(value) for value in stat[11:15]) / 100  # utime, stime, cutime, cstime
        status = site.run("head", "cat", f"/proc/{pid}/status").stdout
        resident = re.search(r"VmRSS:\s+(\d+) kB", status)
        memory += int(resident[1]) / 1024 if resident else 0.0
    return cpu, memory


def stop_seen_by_us(site: DemoSite) -> dict[str, float]:
    """Seconds from `scancel` until Slurm's own queue, broker, hub and portal show a session as ended."""
    views = Views(site, USER)
    try:
        options = {"image": "base", "nodes": "1", "gpus_per_node": "0", "minutes": "30"}
        name = views.visitor.start(options)
        wait_until("the session is ready", lambda: views.observe([name])[name].portal == "ready")
        time.sleep(2)
        cancelled = cancel(site, f"session-{name}")
        seen: dict[str, float] = {}
        while len(seen) < 4 and time.time() < cancelled + 60:
            view = views.observe([name])[name]
            now = time.time() - cancelled
            for who, over in (
                ("slurm", view.slurm == ""),
                ("broker", view.broker == "ended"),
                ("hub", view.hub == ""),
                ("portal", view.portal == "ended"),
            ):
                if over:
                    seen.setdefault(who, round(now, 2))
        return {who: seen.get(who, 60.0) for who in ("slurm", "broker", "hub", "portal")}
    finally:
        views.close()


def stop_seen_by_hub(site: DemoSite, hub: HubApi) -> dict[str, float]:
    """Seconds from `scancel` until a hub shows the server of a job as ended."""
    user, name = ACCOUNTS[-1], "s" + secrets.token_hex(4)
    hub.start(user, name, {})
    time.sleep(2)
    found = site.run("head", "squeue", "--noheader", f"--user={user}", "--format=%A").stdout.split()
    cancelled = cancel(site, job_id=max(found, key=int))
    while name in hub.servers(user):
        if time.time() > cancelled + 90:
            return {"hub": 90.0}
        time.sleep(0.1)
    return {"hub": round(time.time() - cancelled, 2)}


def cancel(site: DemoSite, name: str = "", job_id: str = "") -> float:
    """End a job behind everybody's back; the time (seconds since 1970) at which Slurm got the command."""
    which = f"--name={name}" if name else job_id
    return float(site.run("head", "sh", "-c", 'date +%s.%N; exec scancel "$1"', "cancel", which).stdout)


if __name__ == "__main__":
    main()
