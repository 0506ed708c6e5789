"""The command `carme-run`."""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from carme_runtime import fusion, logs, oom_score, profile, strategies
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.client import Fabric, connect
from carme_runtime.imports import first_in_path
from carme_runtime.launcher import backends, cleanup, dry, gaspi, horovod, hostfile, mpi, slurm, slurm_agents
from carme_runtime.launcher.arguments import parse, parser
from carme_runtime.launcher.elastic import Limits, Seats
from carme_runtime.launcher.elastic import execute as elastic
from carme_runtime.launcher.help import Section, help_link
from carme_runtime.launcher.nodes import wait_for_nodes
from carme_runtime.launcher.placement import Place, place
from carme_runtime.launcher.programs import Programs
from carme_runtime.launcher.rank_options import RankOptions, plan
from carme_runtime.launcher.run import Run
from carme_runtime.launcher.run_setup import Setup
from carme_runtime.out_of_core import start as out_of_core
from carme_runtime.scaling import start as scaling
from carme_runtime.traces import launch as traces
from carme_runtime.transports import TORCH_BACKEND, TRANSPORT

__all__ = ["main", "parser"]

NOT_STARTED = 2


def main(announces: bool = False) -> None:
    """Start a run and stay until it ends; see `carme-run --help`.

    Args:
        announces: Whether to say how many ranks start, before the first of them has written anything.
    """
    if sys.argv[1:2] == ["compare"] and not Path("compare").is_file():
        from carme_runtime.compare.command import main as compare

        sys.exit(compare(sys.argv[2:], "carme-run compare"))
    if sys.argv[1:2] == ["net"] and not Path("net").is_file():
        from carme_runtime.petri.command import main as net

        sys.exit(net(sys.argv[2:], "carme-run net"))
    if sys.argv[1:2] == ["onnx"] and not Path("onnx").is_file():
        from carme_runtime.onnx.command import main as onnx

        sys.exit(onnx(sys.argv[2:], "carme-run onnx"))
    if sys.argv[1:2] == ["--onnx"]:  # its other options are not those of scripts
        from carme_runtime.onnx.command import main as onnx

        sys.exit(onnx(["run", *sys.argv[2:]], "carme-run --onnx"))
    try:
        _check_folder()
        # Anyone who started this may have let interrupts wait until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        code = asyncio.run(_run(sys.argv[1:], announces))
    except CarmeRuntimeError as error:
        print(f"carme-run: {error}{help_link(Section.FAILURE)}", file=sys.stderr)
        code = NOT_STARTED
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = 128 + signal.SIGINT
    sys.exit(code)


def _check_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise CarmeRuntimeError(
            "The folder that you are in has been removed.", "Go to another one with cd."
        ) from None


async def _run(arguments: list[str], announces: bool) -> int:
    """The exit code; 128 more than its number after a signal that came before a run took signals over."""
    own_task, received = asyncio.current_task(), list[signal.Signals]()
    assert own_task

    def end(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:  # what cleans up then is not to be ended by a second one
            own_task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The loop hears of one even if it comes just before it waits.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        return await _find_nodes(arguments, announces)
    except asyncio.CancelledError:
        if not received:
            raise
        if received[0] != signal.SIGINT:
            print("carme-run: The run was ended by a signal.", file=sys.stderr)
        return 128 + received[0]


async def _find_nodes(arguments: list[str], announces: bool) -> int:
    """Reach the nodes of the job, by agents that are started where there are none, and run there."""
    options, command = parse(arguments)
    options.announces = announces
    probing = scaling.prepare(options)
    async with contextlib.AsyncExitStack() as stack:
        fabric = await connect(os.environ)
        agents = None if fabric.in_job else slurm_agents.plan(options, os.environ)
        if agents and not options.dry_run:
            await fabric.close()
            await stack.enter_async_context(slurm_agents.started(agents, os.environ))
            fabric = await connect(os.environ)
        try:
            return await _place(fabric, command, options, probing, agents)
        finally:
            await fabric.close()


async def _place(
    fabric: Fabric,
    command: list[str],
    options: argparse.Namespace,
    probing: dict[str, str],
    agents: slurm_agents.Plan | None,
) -> int:
    """Find nodes for the ranks, and run there; `agents`: those that this command starts."""
    # What cannot start several nodes, or starts nothing, says so itself.
    starts_here = not fabric.in_job and not agents and not options.cleanup and (options.nodes or 1) < 2
    if starts_here and (message := slurm.warning(os.environ, slurm_agents.nodes_for(options))):
        print(f"carme-run: {message}", file=sys.stderr, flush=True)
    planned = agents.members(fabric.members) if agents and options.dry_run else None
    options.agents = agents if planned else None
    if not options.cleanup and not planned:
        await wait_for_nodes(fabric, options.nodes)
    members, slots, hosts = planned or fabric.members, None, None
    if options.hostfile:
        members, slots = hostfile.choose(members, hostfile.read(options.hostfile))
        hosts = {member.host for member in members.present}
    if options.cleanup:
        nodes = members.present[: options.nodes]
        return await cleanup.execute(fabric, nodes, command[0], options.force, options.dry_run)
    places = place(
        members.without_devices() if options.no_gpu else members,
        ranks=options.n,
        nodes=options.nodes,
        per_node=options.devices_per_node,
        devices_per_rank=options.devices_per_rank,
        slots=slots,
    )
    return await _start(fabric, places, command, options, hosts, probing)


async def _start(
    fabric: Fabric,
    places: list[Place],
    command: list[str],
    options: argparse.Namespace,
    hosts: set[str] | None,
    probing: dict[str, str],
) -> int:
    """Run `command` at `places`, or say what that would be."""
    rank_options = RankOptions(
        options.devices_per_rank,
        options.pin_cpus or options.pin_memory,
        options.output,
        options.log_folder,
        options.no_gpu,
        options.pin_memory,
    )
    limits = Limits(options.max_restarts, options.min_ranks or 1, options.max_ranks)
    limits.check(len(places))
    environment = os.environ | _variables(options) | probing
    backend = backends.BACKENDS[options.backend or "torch"]
    blank = [0] * len(backend.ports(places))
    hidden = dict.fromkeys(backend.secrets, dry.SECRET)
    setup = Setup(places, blank, environment, options.devices_per_rank, options.no_gpu, hidden)
    backend.refuses(setup)
    if backend.driver:
        places = [dataclasses.replace(places[0], local_size=1)]
        rank_options = dataclasses.replace(
            rank_options, devices_per_rank=None, pin_cpus=False, pin_memory=False
        )
    if options.dry_run:
        print(dry.report(setup, places, rank_options, command, options.backend, options.json, options.agents))
        return 0
    if options.backend:
        backends.check_installed(options.backend)
    if options.log_level in ("DEBUG", "INFO"):
        print(f"carme-run: {plan(places, rank_options, command)}", file=sys.stderr, flush=True)
    if options.profile:
        environment[profile.PROFILE] = str(options.profile.absolute())
        profile.forget(options.profile, options.max_ranks or len(places))
    tracing = traces.prepare(options, options.max_ranks or len(places))
    environment |= tracing.variables() if tracing else {}
    try:
        code = await _run_ranks(
            fabric, places, command, options, environment, rank_options, limits, setup, hosts
        )
    finally:
        if tracing:
            tracing.finish()
    _show_profile(options, len(places))
    return scaling.checked(options, code)


async def _run_ranks(
    fabric: Fabric,
    places: list[Place],
    command: list[str],
    options: argparse.Namespace,
    environment: dict[str, str],
    rank_options: RankOptions,
    limits: Limits,
    setup: Setup,
    hosts: set[str] | None,
) -> int:
    """Run until it is over; the exit code."""
    if options.announces and not backends.BACKENDS[options.backend or "torch"].driver:
        print(_announcement(setup.places), file=sys.stderr, flush=True)
    if limits.max_restarts:
        seats = Seats(places, options.max_ranks or len(places), options.nodes, hosts)
        cwd = str(Path.cwd())
        return await elastic(fabric, places, command, cwd, environment, rank_options, limits, seats)
    if options.backend == "mpi":
        await _become_mpirun(fabric, places, command, environment, options)
    return await _execute(fabric, places, command, environment, rank_options, options.backend, setup)


async def _execute(
    fabric: Fabric,
    places: list[Place],
    command: list[str],
    environment: dict[str, str],
    rank_options: RankOptions,
    name: str | None,
    blank: Setup,
) -> int:
    """Run with what the backend sets and starts; `blank`: its setup without ports and secrets."""
    backend, cwd = backends.BACKENDS[name or "torch"], str(Path.cwd())
    async with contextlib.AsyncExitStack() as stack:
        failing = None
        if name == "horovod":
            variables = await stack.enter_async_context(horovod.rendezvous(places, environment))
        else:
            ports = await backends.free_ports(fabric, backend.ports(blank.places))
            hidden = dict(zip(backend.secrets, backend.make_secrets(), strict=True))
            setup = dataclasses.replace(blank, ports=ports, caller=environment, secrets=hidden)
            variables = backend.variables(setup)
            # What is no rank would write its profile in the place of rank 0's.
            unrecorded = {n: v for n, v in environment.items() if n not in (profile.PROFILE, profile.TRACE)}
            failing = await stack.enter_async_context(Programs(backend.programs(setup), unrecorded, cwd))
        if name == "gaspi":
            command = gaspi.wrapped(command)
        run = Run(
            fabric, places, command, cwd, environment, rank_options,
            variables=variables, explains=backend.explains,
        )  # fmt: skip
        if failing:
            failing.on_failure(run.fail)
        return await run.execute()


def _announcement(places: list[Place]) -> str:
    ranks, nodes = len(places), places[-1].node_rank + 1
    return f"Starting {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)} ..."


def _show_profile(options: argparse.Namespace, ranks: int) -> None:
    if options.profile:
        print(profile.table(options.profile, ranks), file=sys.stderr, flush=True)


async def _become_mpirun(
    fabric: Fabric,
    places: list[Place],
    program: list[str],
    environment: Mapping[str, str],
    options: argparse.Namespace,
) -> NoReturn:
    """Replace this process: signals and the exit code are then those of mpirun."""
    first = places[0].member.number
    fabric.send(first, {"type": "port"})
    while (event := await fabric.next_event()).node != first or event.content["type"] != "port":
        if event.gone:
            raise CarmeRuntimeError("The job's agent on this node was lost.", "Start a new job.")
    line, own = mpi.command(places, program, environment, _variables(options), event.content["port"])
    await fabric.close()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    oom_score.raise_own(oom_score.RANK)  # of what it starts here; other nodes' agents do it for theirs
    os.execve(line[0], line, own)


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """What the options set in the ranks' environment."""
    chosen = {
        TRANSPORT: options.transport,
        TORCH_BACKEND: options.torch_backend,
        logs.LEVEL: options.log_level,
        logs.KERAS_EVERYWHERE: "true" if options.output_on_all_devices else None,
        fusion.THRESHOLD: options.fusion_threshold,
        strategies.STRATEGY: options.strategy,
        strategies.PLAN: 1 if options.plan else None,
        "CARME_HANG_SECONDS": options.hang_seconds,
    }
    own = dict(options.x)
    path = own.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    own |= out_of_core.variables(options.memory_per_rank, options.spill, path, recompute=options.recompute)
    if options.scale_probe:
        own["PYTHONPATH"] = first_in_path(path)
    return own | {name: str(value) for name, value in chosen.items() if value is not None}


if __name__ == "__main__":
    main()
