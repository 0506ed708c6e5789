"""How a person wants ranks to be run, beyond how many and where."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carme_runtime.launcher.placement import Place


@dataclass(frozen=True)
class RankOptions:
    """What `carme-run --help` says of the options of the same names."""

    devices_per_rank: int | None = None
    pin_cpus: bool = False
    output: str = "all"
    log_folder: Path | None = None
    no_gpu: bool = False
    pin_memory: bool = False

    def of(self, place: Place) -> dict[str, Any]:
        """What the node learns about a rank: first and last but one of its GPUs and of its cores."""
        reported: dict[str, Any] = {}
        if self.no_gpu:
            reported["devices"] = [0, 0]
        elif self.devices_per_rank and place.member.devices:
            begin = place.local_rank * self.devices_per_rank
            reported["devices"] = [begin, begin + self.devices_per_rank]
        if self.pin_cpus:
            cpus, ranks = place.member.cpus, place.local_size
            if cpus >= ranks:
                reported["cpus"] = [cpus * place.local_rank // ranks, cpus * (place.local_rank + 1) // ranks]
            else:
                reported["cpus"] = [place.local_rank % cpus, place.local_rank % cpus + 1]
        if self.pin_memory:
            reported["memory"] = True
        return reported


def plan(places: list[Place], rank_options: RankOptions, command: list[str]) -> str:
    """Where ranks would run, for people."""
    lines = [f"{len(places)} rank{'s' * (len(places) > 1)} of: {shlex.join(command)}"]
    for place in places:
        reported = rank_options.of(place)
        line = f"rank {place.rank} on {place.member.host}, number {place.local_rank} there"
        for kind, name in (("devices", "GPU"), ("cpus", "core")):
            if kind in reported:
                begin, end = reported[kind]
                span = f"{name} {begin}" if end == begin + 1 else f"{name}s {begin} to {end - 1}"
                line += f", {span if end > begin else f'no {name}'}"
        lines.append(line + ", memory near them" * ("memory" in reported))
    return "\n".join(lines)
