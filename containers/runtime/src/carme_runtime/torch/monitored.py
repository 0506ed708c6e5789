"""A barrier that says which members did not come to it.

Each member notifies all others of its arrival. The first one decides, when all have come or its time is over,
and notifies the others. It is made of messages between two, so that a member who is missing breaks no group.
"""

# As in backend.py.
# pyright: reportMissingImports=false

import time

import torch

from carme_runtime.collectives import Group, Pending
from carme_runtime.collectives.errors import PeerLost, Timeout

_TAG = 2**32 - 1
_SLICE_MS = 50  # between two checks of whether somebody else was lost
_CAME, _LATE, _LOST, _UNKNOWN = range(4)  # what the first member has to say of each


def wait_for_all(group: Group, limit: int, wait_all: bool) -> None:
    """See `ProcessGroupCarme.monitored_barrier`; `limit` in milliseconds, -1 for ever."""
    arrivals = _Arrivals(group, limit)
    if group.index == 0:
        arrivals.await_members(wait_all)
        states = arrivals.states
        verdict = torch.tensor(states, dtype=torch.uint8)
        reported = {member: group.send(verdict, member, _TAG) for member in arrivals.peers}
        arrivals.await_messages(reported)
    else:
        verdict = torch.empty(group.size, dtype=torch.uint8)
        answer = arrivals.await_messages({0: group.receive(verdict, 0, _TAG)})
        if answer.get(0) == _CAME:
            states = verdict.tolist()
        else:  # this member says what it knows by itself
            arrivals.await_members(wait_all, limit=0)
            states = arrivals.states
            if states[0] == _CAME:
                states[0] = answer.get(0, _CAME if _LATE in states else _LATE)
    if any(state != _CAME for state in states):
        raise _explained(group, states, limit)
    arrivals.await_members(True, limit=-1)  # what is still on its way to this member


class _Arrivals:
    """What the others have sent, and what is known of each member."""

    def __init__(self, group: Group, limit: int) -> None:
        self._end = time.monotonic() + limit / 1000 if limit >= 0 else float("inf")
        self.peers = [member for member in range(group.size) if member != group.index]
        self.states = [_CAME if member == group.index else _UNKNOWN for member in range(group.size)]
        signal = torch.ones(1, dtype=torch.uint8)
        self._sent = [group.send(signal, member, _TAG) for member in self.peers]
        self._arriving = {
            member: group.receive(torch.empty_like(signal), member, _TAG) for member in self.peers
        }

    def await_members(self, wait_all: bool, limit: int | None = None) -> None:
        """Wait for the others, until one was lost unless `wait_all`.

        `limit`, in place of the time that is left: 0 for a look, -1 for ever.
        """
        end = self._end if limit is None else float("inf") if limit < 0 else time.monotonic()
        missing = {member: self._arriving[member] for member in self.peers if self.states[member] == _UNKNOWN}
        while missing:
            for member, state in _poll(missing, end).items():
                self.states[member] = state
                del missing[member]
            if _LOST in self.states and not wait_all:
                return
            if time.monotonic() >= end:
                for member in missing:
                    self.states[member] = _LATE
                return

    def await_messages(self, messages: dict[int, Pending]) -> dict[int, int]:
        """Wait until these are over, or the time is; return what became of those that are, by member."""
        found: dict[int, int] = {}
        while len(found) < len(messages):
            found |= _poll({member: messages[member] for member in messages.keys() - found.keys()}, self._end)
            if time.monotonic() >= self._end:
                break
        return found


def _poll(messages: dict[int, Pending], end: float) -> dict[int, int]:
    """Wait shortly, return what became of messages that are over, by member."""
    found: dict[int, int] = {}
    patience = _SLICE_MS
    for member, message in messages.items():
        left = min(end - time.monotonic(), 3600.0)
        try:
            if message.wait(max(min(patience, int(left * 1000)), 0)):
                found[member] = _CAME
            else:
                patience = 0  # all have had their time meanwhile
        except PeerLost:
            found[member] = _LOST
    return found


def _explained(group: Group, states: list[int], limit: int) -> Exception:
    late = [group.ranks[member] for member, state in enumerate(states) if state == _LATE]
    lost = [group.ranks[member] for member, state in enumerate(states) if state == _LOST]
    message = [f"{_named(late)} did not come to monitored_barrier within {limit / 1000:g} s."] if late else []
    if lost:
        message.append(f"{_named(lost)} {'was' if len(lost) == 1 else 'were'} lost during monitored_barrier.")
    if late:
        return Timeout(
            " ".join(message), "See what they do: CARME_HANG_SECONDS=10 lets the ranks print where they are."
        )
    return PeerLost(" ".join(message), "Form a new group without them, or start the run again.")


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
