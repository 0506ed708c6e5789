"""Attacks: metrics."""

import time
from urllib.parse import quote

from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.case import Area, add
from carme.validation.attacks.cases.notebook_server import (
    as_browser,
    certificate_of,
    moves_any,
    via_proxy,
)
from carme.validation.attacks.fixture import Fixture, Player

AREA = Area("Metrics")

#: Ways to ask for the series of a job, by a user who may not see them.
QUERIES = (
    'carme_job_info{jobid="JOB"}',
    '{user="VICTIM"}',
    '{jobid=~".+"}',
    'carme_job_info or carme_job_info{user="VICTIM"}',
    'max_over_time(carme_job_info{jobid="JOB"}[10m:30s])',
    'carme_job_info{user="ATTACKER"} or on () carme_job_info{jobid="JOB"}',
    'carme_job_info{user="ATTACKER\\"} or carme_job_info{user=\\"VICTIM"}',
)


def series(fixture: Fixture, player: Player, scope: str) -> Outcome:
    """Look for the victim's job in what the portal shows of metrics."""
    outcomes = []
    for query in QUERIES:
        requested = query.replace("JOB", str(fixture.job_id)).replace("VICTIM", fixture.victim.name)
        requested = quote(requested.replace("ATTACKER", fixture.attacker.name))
        for path in (f"query?query={requested}", f"series?match[]={requested}"):
            where = f"/metrics/{scope}/api/v1/{path}"
            outcomes.append(
                via_proxy(fixture, where, headers=as_browser(player, where), text=f'"{fixture.job_id}"')
            )
    return moves_any(*outcomes)


def own_series(fixture: Fixture) -> Outcome:
    """The victim asks the same about the victim's own jobs; the next scrape may be still to come."""
    end = time.monotonic() + 60
    while not (found := series(fixture, fixture.victim, "mine"))[0] and time.monotonic() < end:
        time.sleep(3)
    return found


for name, what, scope in (
    ("own series", "looks for the victim's job among the series of the attacker's own jobs", "mine"),
    (
        "account's series",
        "looks for it among those of the victim's account, which others manage",
        "account/ACCOUNT",
    ),
    ("all series", "looks for it among all series, which administrators may see", "all"),
):
    add(
        AREA,
        name,
        what,
        lambda s, scope=scope: series(
            s, s.attacker, scope.replace("ACCOUNT", s.victim.job.account if s.victim.job else "")
        ),
        own_series,
        needs_metrics=True,
    )
add(
    AREA,
    "Prometheus itself",
    "asks Prometheus, past the portal, on the head",
    lambda s: moves_any(
        *(
            s.attacker_head.run("http", host="127.0.0.1", port=9090, path="/api/v1/query?query=up", tls=tls)
            for tls in (True, False)
        )
    ),
    own_series,
    needs_metrics=True,
)
add(
    AREA,
    "exporter",
    "asks the exporter of the node, without and with the certificate of the attacker's own server",
    lambda s: s.attacker_node.run(
        "at_once",
        name="http",
        tries=[
            {"host": s.agent[0], "port": 9750, "path": "/metrics", **more}
            for more in ({}, {"tls": False}, certificate_of(s.attacker))
        ],
    ),
    own_series,
    needs_metrics=True,
)
