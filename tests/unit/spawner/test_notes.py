"""Notes reach the broker in order, whatever hinders them for a while."""

import logging
from pathlib import Path

from carme.broker import AsyncBrokerClient
from carme.errors import BrokerUnavailable, CarmeError
from carme.sessions import ServerStatus, SessionNote
from carme_spawner.notes import Notes


class HinderedBroker(AsyncBrokerClient):
    """Refuses the first notes."""

    def __init__(self, refusals: list[CarmeError]) -> None:
        super().__init__(Path("/nonexistent"))
        self.refusals = refusals
        self.taken: list[SessionNote] = []

    async def note(self, job_id: int, user: str, note: SessionNote, session: str | None = None) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.taken.append(note)


STARTING, READY = SessionNote(server=ServerStatus.STARTING), SessionNote(server=ServerStatus.READY)


async def test_a_note_is_reported_again_while_the_broker_is_away_or_has_too_many_clients() -> None:
    broker = HinderedBroker([BrokerUnavailable("Away."), CarmeError("Full.", code="busy")])
    notes = Notes(broker, logging.getLogger("notes"))
    notes.send(1, "ada", "s1", STARTING)
    await notes.send(1, "ada", "s1", READY)
    assert broker.taken == [STARTING, READY]


async def test_a_note_that_the_broker_refuses_for_good_holds_no_later_one_up() -> None:
    broker = HinderedBroker([CarmeError("No such session.")])
    notes = Notes(broker, logging.getLogger("notes"))
    notes.send(1, "ada", "s1", STARTING)
    await notes.send(1, "ada", "s1", READY)
    assert broker.taken == [READY]
