"""Attacks: the broker."""

from typing import Any

from carme.broker import BrokerClient
from carme.validation.attacks import actions
from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.case import Area, Step, add
from carme.validation.attacks.cases.node import cancelled, small_job
from carme.validation.attacks.fixture import Fixture

AREA = Area("The broker")


def ask(question: dict[str, Any], text: str = "") -> tuple[Step, Step]:
    """A question about the victim, by the attacker and by the victim."""

    def by(executor: str) -> Step:
        def step(fixture: Fixture) -> Outcome:
            filled = {
                key: {
                    "JOB": fixture.job_id,
                    "SESSION": fixture.victim.session,
                    "VICTIM": fixture.victim.name,
                }.get(str(value), value)
                for key, value in question.items()
            }
            seen = text.replace("SESSION", fixture.victim.session)
            return getattr(fixture, executor).run(
                "broker", path=str(fixture.settings.broker.socket), question=filled, text=seen
            )

        return step

    return by("attacker_head"), by("victim_head")


for name, what, question, text in (
    ("job", "reads the victim's job", {"method": "job", "job_id": "JOB"}, ""),
    ("log", "reads its log", {"method": "log", "job_id": "JOB"}, ""),
    ("session", "reads the victim's session", {"method": "session", "name": "SESSION"}, ""),
    ("jobs", "lists jobs as the victim", {"method": "jobs", "user": "VICTIM"}, ""),
    ("own jobs", "finds the victim's among the attacker's own jobs", {"method": "jobs"}, "session-SESSION"),
    ("history", "lists ended jobs as the victim", {"method": "history", "user": "VICTIM"}, ""),
    ("sessions", "lists sessions as the victim", {"method": "sessions", "user": "VICTIM"}, ""),
    ("events", "finds the victim's job among the changes", {"method": "events"}, "session-SESSION"),
    ("extend", "prolongs the victim's session", {"method": "extend", "job_id": "JOB", "minutes": 1}, ""),
    (
        "extend as the victim",
        "does so in the victim's name",
        {"method": "extend", "job_id": "JOB", "minutes": 1, "user": "VICTIM"},
        "",
    ),
):
    add(AREA, name, what, *ask(question, text))
for name, question in (
    ("cancel", {"method": "cancel", "job_id": "JOB"}),
    ("cancel as the victim", {"method": "cancel", "job_id": "JOB", "user": "VICTIM"}),
):
    add(
        AREA,
        name,
        "cancels the victim's job" + (" in the victim's name" if "user" in question else ""),
        ask(question)[0],
        lambda s: cancelled(
            s,
            s.victim,
            lambda job: s.victim_head.run(
                "broker", path=str(s.settings.broker.socket), question={"method": "cancel", "job_id": job}
            ),
        ),
    )


def submitted(executor: str, user: str | None, **changes: Any) -> Step:
    """Submit a job; one that is taken is ended again."""

    def step(fixture: Fixture) -> Outcome:
        request = small_job(**changes).model_dump(mode="json")
        named = fixture.victim.name if user == "VICTIM" else user
        question = {"method": "submit", "request": request, "user": named}
        reached, message = getattr(fixture, executor).run(
            "broker", path=str(fixture.settings.broker.socket), question=question
        )
        number = message.removeprefix("granted: ")
        if reached and number.isdecimal():
            BrokerClient(fixture.settings.broker.socket).cancel(int(number))
        return reached, message

    return step


for name, user in (
    ("submit as the victim", "VICTIM"),
    ("submit as root", "root"),
    ("submit as the hub", "carme-hub"),
):
    add(
        AREA,
        name,
        f"submits a job in the name of {user.lower() if user != 'VICTIM' else 'the victim'}",
        submitted("attacker_head", user),
        submitted("victim_head", "VICTIM"),
    )
add(
    AREA,
    "note",
    "reports to the broker what only the hub may say: that the victim's session was lost",
    ask({"method": "note", "job_id": "JOB", "user": "VICTIM", "note": {}})[0],
    lambda s: actions.broker(
        str(s.settings.broker.socket), {"method": "job", "job_id": s.job_id, "user": s.victim.name}
    ),
)
