"""A session of ada's as squeue prints it, and waiting for what becomes of it."""

from typing import Any

from carme.sessions import Session, SessionState

KEY = "0" * 32
STARTED = 1795181600
JOB: dict[str, Any] = {
    "A": 7, "j": "session-s1", "u": "ada", "P": "gpu", "T": "RUNNING", "D": 1, "C": 1, "m": "1M",
    "l": "1:00:00", "N": "n1", "V": STARTED - 60, "S": STARTED,
    "k": f"carme/1 kind=session image=torch key={KEY}",
}  # fmt: skip


async def reaches(site: Any, state: SessionState, name: str = "s1") -> Session:
    """Wait until events report that the session is in a state."""
    batch = await site.client.events()
    while True:
        for session in batch.sessions:
            if session.name == name and session.state is state:
                return session
        batch = await site.client.events(batch.cursor, wait=30)
