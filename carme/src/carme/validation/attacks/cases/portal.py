"""Attacks: the portal."""

from collections.abc import Callable

from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.case import Area, Step, add
from carme.validation.attacks.cases.job_fabric import ATTACKER, VICTIM
from carme.validation.attacks.cases.node import lives
from carme.validation.attacks.cases.notebook_server import as_browser, via_proxy
from carme.validation.attacks.fixture import Fixture, Player

AREA = Area("The portal")


def page(path: str) -> tuple[Step, Step]:
    """A page of the victim's, by the attacker and by the victim."""

    def by(player: Callable[[Fixture], Player]) -> Step:
        def step(fixture: Fixture) -> Outcome:
            where = path.replace("SESSION", fixture.victim.session).replace("JOB", str(fixture.job_id))
            return via_proxy(fixture, where, headers=as_browser(player(fixture), where))

        return step

    return by(ATTACKER), by(VICTIM)


for name, what, path in (
    ("session's page", "opens the victim's session's page", "/sessions/SESSION/"),
    ("session's live page", "opens its live part", "/sessions/SESSION/live/"),
    ("stop page", "opens the page that stops it", "/sessions/SESSION/stop/"),
    ("job's page", "opens the page of the victim's job, with its log", "/jobs/JOB/"),
    ("job's use", "opens what the victim's job used", "/jobs/JOB/use/"),
):
    add(AREA, name, what, *page(path))
for name, what, path in (
    ("stop", "sends the form that stops the victim's session", "/sessions/SESSION/stop/"),
    ("extend", "sends the form that prolongs it", "/sessions/SESSION/extend/"),
):
    add(AREA, name, what, lambda s, path=path: sent_form(s, path), page("/sessions/SESSION/")[1])


def sent_form(fixture: Fixture, path: str) -> Outcome:
    """Send a form as the attacker, with the attacker's own valid token against forgery."""
    visitor = fixture.attacker.visitor
    url = fixture.settings.site.url
    start = visitor.form(visitor.fetch(url), "gpus_per_node")
    form_token = start.select_one('[name="csrfmiddlewaretoken"]')
    assert form_token
    answer = visitor.http.post(
        url + path.replace("SESSION", fixture.victim.session),
        data={"csrfmiddlewaretoken": str(form_token["value"]), "minutes": "1"},
        headers={"Referer": url + "/"},
        follow_redirects=False,
    )
    return answer.status_code < 400 or not lives(fixture), f"status {answer.status_code}"
