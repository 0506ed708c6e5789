"""`carme-run --dry-run`: where ranks would run, and what a backend would set, start and stop."""

import json
import os
from typing import Any

from carme_runtime.launcher.backends import BACKENDS, missing
from carme_runtime.launcher.placement import Place, rank_environment
from carme_runtime.launcher.rank_options import RankOptions, plan
from carme_runtime.launcher.run_setup import Setup
from carme_runtime.launcher.slurm_agents import Plan

SECRET = "(a secret of the run)"


def report(
    setup: Setup,
    places: list[Place],
    rank_options: RankOptions,
    command: list[str],
    name: str | None,
    as_json: bool,
    agents: Plan | None = None,
) -> str:
    """What would happen, for people, or as JSON for programs.

    Args:
        setup: Its ports are 0, which stands for one that is free at the start.
        places: Where the script would run.
        rank_options: How ranks would be run.
        command: What each rank would execute.
        name: The backend.
        as_json: Whether it is for programs.
        agents: How the job's nodes would be joined, where they are not.
    """
    if as_json:
        found = _for_programs(setup, places, rank_options, command, name)
        if agents:
            found["agents"] = {"hosts": agents.hosts, "command": agents.srun()}
        return json.dumps(found, indent=2)
    lines = [plan(places, rank_options, command), *(_for_people(setup, name) if name else [])]
    return "\n".join([*lines, agents.report()] if agents else lines)


def _for_people(setup: Setup, name: str) -> list[str]:
    backend, lacking = BACKENDS[name], missing(name)
    lines = [
        f"--backend {name} sets: {', '.join(backend.sets) or 'nothing'}",
        f"starts: {backend.starts}",
        f"stops: {backend.stops}",
        *(f"{each.name} on {', '.join(each.hosts_with_counts)}" for each in backend.programs(setup)),
    ]
    has_it = "this Python does not have" if backend.modules else "is not on PATH"
    return [*lines, f"lacks: {', '.join(lacking)}, which {has_it}"] if lacking else lines


def _for_programs(
    setup: Setup, places: list[Place], rank_options: RankOptions, command: list[str], name: str | None
) -> dict[str, Any]:
    variables = BACKENDS[name or "torch"].variables(setup)
    ranks = [
        {
            "rank": place.rank,
            "host": place.member.host,
            "local_rank": place.local_rank,
            "environment": rank_environment(place, places, 0, os.environ) | variables.get(place.rank, {}),
        }
        | rank_options.of(place)
        for place in places
    ]
    found: dict[str, Any] = {"command": command, "ranks": ranks}
    if name:
        backend = BACKENDS[name]
        found["backend"] = {
            "name": name,
            "sets": list(backend.sets),
            "starts": backend.starts,
            "stops": backend.stops,
            "programs": [
                {"name": program.name, "hosts": program.hosts, "command": program.command}
                for program in backend.programs(setup)
            ],
            "missing": missing(name),
        }
    return found
