"""Runs that go on without the ranks and nodes that they lost: all ranks are started anew, fewer of them.

What they compute goes on from the checkpoint that the program itself wrote last.
"""

import dataclasses
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.client import Fabric
from carme_runtime.fabric.members import Members
from carme_runtime.launcher.placement import Place, place
from carme_runtime.launcher.rank_options import RankOptions
from carme_runtime.launcher.run import Run

RESTARTS = "CARME_RESTARTS"
FOLDER = "CARME_ELASTIC_FOLDER"


@dataclass(frozen=True)
class Limits:
    """What `carme-run --help` says of the options of the same names."""

    max_restarts: int = 0
    min_ranks: int = 1
    max_ranks: int | None = None  # None: as many as the first ones

    def check(self, ranks: int) -> None:
        """Raises CarmeRuntimeError where `ranks`, with which the run is to begin, are too few or too many."""
        if self.max_ranks is not None and self.max_ranks < self.min_ranks:
            raise CarmeRuntimeError(
                f"--min-ranks {self.min_ranks} is more than --max-ranks {self.max_ranks}.", "Exchange them."
            )
        if ranks < self.min_ranks:
            raise CarmeRuntimeError(
                f"The run has {ranks} ranks, and --min-ranks asks for {self.min_ranks}.",
                "Use a smaller --min-ranks, or give the run more ranks with -n.",
            )
        if self.max_ranks is not None and ranks > self.max_ranks:
            raise CarmeRuntimeError(
                f"The run has {ranks} ranks, and --max-ranks allows {self.max_ranks}.",
                f"Use -n {self.max_ranks}, or a larger --max-ranks.",
            )


class Seats:
    """How many ranks each node may have, as ranks and nodes come and go.

    Args:
        places: The run's first ones. Another node may have as many ranks as the fullest of them.
        most: Ranks in all.
        nodes: At most so many at a time; None: all.
        hosts: The only ones to use; None: all.
    """

    def __init__(
        self, places: list[Place], most: int, nodes: int | None = None, hosts: set[str] | None = None
    ) -> None:
        self._first = Counter(place.member.host for place in places)
        self._lost: Counter[int] = Counter()  # by number of the node, which a node that returns has anew
        self._most, self._nodes, self._hosts = most, nodes, hosts

    def lose(self, places: list[Place], ranks: set[int]) -> None:
        """These ranks were lost, and nobody knows why: their seats are not used again."""
        for each in places:
            self._lost[each.member.number] += each.rank in ranks

    def places(self, members: Members, devices_per_rank: int | None) -> list[Place]:
        """Where ranks may run now; none where nothing is left."""
        rooms = {
            member: (self._first[member.host] or max(self._first.values())) - self._lost[member.number]
            for member in members.present
            if self._hosts is None or member.host in self._hosts
        }
        used = [(member, room) for member, room in rooms.items() if room > 0][: self._nodes]
        if not used:
            return []
        chosen = dataclasses.replace(members, present=tuple(member for member, _ in used))
        seats = [room for _, room in used]
        ranks = min(sum(seats), self._most)
        return place(chosen, ranks=ranks, devices_per_rank=devices_per_rank, slots=seats)


async def execute(
    fabric: Fabric,
    places: list[Place],
    command: list[str],
    cwd: str,
    environment: Mapping[str, str],
    rank_options: RankOptions,
    limits: Limits,
    seats: Seats,
) -> int:
    """Run until all ranks end well, or nothing can go on; the exit code, as of `Run.execute`."""
    folder = Path(cwd) / f".carme-elastic-{secrets.token_hex(4)}"
    restarts = starts = 0
    while True:
        count = len(places)

        def grows(members: Members, count: int = count) -> bool:
            return len(seats.places(members, rank_options.devices_per_rank)) > count

        variables = dict(environment) | {RESTARTS: str(starts), FOLDER: str(folder)}
        run = Run(fabric, places, command, cwd, variables, rank_options, starts, grows)
        code = await run.execute()
        if not run.recoverable:
            break
        seats.lose(places, run.lost)
        if not run.growing:
            restarts += 1
        if restarts > limits.max_restarts:
            _log(f"The run had its {limits.max_restarts} restarts, and is over.")
            break
        places = seats.places(fabric.members, rank_options.devices_per_rank)
        if len(places) < max(limits.min_ranks, 1):
            left = f"{len(places)} rank" + ("s" if len(places) != 1 else "")
            _log(f"{left} could go on, and --min-ranks asks for {limits.min_ranks}: the run is over.")
            break
        starts += 1
        reason = "A node has come" if run.growing else f"Restart {restarts} of {limits.max_restarts}"
        _log(f"{reason}: {len(places)} ranks go on, {count} there were before.")
    if code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        _log(f"What the ranks committed last is in {folder}.")
    return code


def _log(sentence: str) -> None:
    print(f"carme-run: {sentence}", file=sys.stderr, flush=True)
