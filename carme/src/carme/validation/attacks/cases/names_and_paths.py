"""Attacks: names and paths."""

from collections.abc import Callable
from typing import Any

from carme.broker import BrokerClient
from carme.errors import CarmeError
from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.case import Area, Step, add
from carme.validation.attacks.cases.broker import ask, submitted
from carme.validation.attacks.cases.node import small_job, wait_until_over
from carme.validation.attacks.fixture import Fixture, Player

AREA = Area("Names and paths")

for name, what, changes in (
    (
        "image by path",
        "names an image by a path out of the catalogue",
        {"image": "../../../etc/passwd", "kind": "session"},
    ),
    ("image, absolute", "names an image by an absolute path", {"image": "/etc/passwd", "kind": "session"}),
    (
        "image as option",
        "names an image like an option of a program",
        {"image": "--bind=/:/host", "kind": "session"},
    ),
    ("partition as option", "names a partition like an option of Slurm's", {"partition": "--uid=0"}),
    ("account as option", "names an account like an option of Slurm's", {"account": "x --uid=0"}),
    ("name with a path", "names a job like a path", {"name": "../../x"}),
    ("name with a line", "names a job with a line for a job script", {"name": "x\n#SBATCH --uid=0"}),
    ("workdir, relative", "names a working directory that is relative", {"workdir": "../../root"}),
    (
        "file with a path",
        "sends a file whose name leads out of the job's folder",
        {"files": {"../spec.json": "{}"}},
    ),
):
    add(
        AREA,
        name,
        what,
        lambda s, changes=changes: raw_submission(s, changes),
        lambda s: submitted("attacker_head", None)(s),
    )


def raw_submission(fixture: Fixture, changes: dict[str, Any]) -> Outcome:
    """Submit what our own models would refuse before it reaches the broker."""
    request = small_job().model_dump(mode="json") | changes
    reached, message = fixture.attacker_head.run(
        "broker", path=str(fixture.settings.broker.socket), question={"method": "submit", "request": request}
    )
    number = message.removeprefix("granted: ")
    if reached and number.isdecimal():
        BrokerClient(fixture.settings.broker.socket).cancel(int(number))
    return reached, message


for name, what, path in (
    ("session's name", "asks the broker for a session by a path", "../../x"),
    ("session's name in SQL", "asks for a session by a piece of SQL", "x' OR '1'='1"),
):
    add(
        AREA,
        name,
        what,
        ask({"method": "session", "name": path})[0],
        ask({"method": "session", "name": "SESSION"})[1],
    )


def log_by_link(target: Callable[[Fixture], str] | None) -> Step:
    """Put a link into the place of an own job's log, or leave it, and have the broker read the log."""

    def step(fixture: Fixture) -> Outcome:
        client = BrokerClient(fixture.settings.broker.socket)
        job_id = client.submit(small_job(command=["echo", "harmless"]), user=fixture.attacker.name)
        job = wait_until_over(client, job_id) or client.job(job_id)
        if target:
            folder = f"{fixture.attacker.account.home}/.local/share/carme/jobs/{job.key}"
            fixture.attacker_head.ask("link", target=target(fixture), path=f"{folder}/output.log")
        reached, message = fixture.attacker_head.run(
            "broker", path=str(fixture.settings.broker.socket), question={"method": "log", "job_id": job_id}
        )
        return reached and '"text": ""' not in message, message

    return step


for name, what, target in (
    (
        "log by link, victim",
        "replaces an own job's log by a link to the victim's",
        lambda s: f"{s.victim.folder}/output.log",
    ),
    ("log by link, root", "replaces it by a link to what root alone may read", lambda s: "/etc/shadow"),
    (
        "log by link, secret",
        "replaces it by a link to a secret of the hub's",
        lambda s: str(s.settings.secrets.directory / "hub-api-token"),
    ),
):
    add(AREA, name, what, log_by_link(target), log_by_link(None))


def workdir_of_the_victim(fixture: Fixture) -> Outcome:
    """A job whose working directory is a link to the victim's home, as the attacker."""
    link = f"{fixture.attacker.account.home}/carme-way-in"
    fixture.attacker_head.ask("link", target=fixture.victim.account.home, path=link)
    try:
        return job_prints(fixture, fixture.attacker, workdir=link, command=["ls", ".local/share/carme"])
    finally:
        fixture.attacker_head.ask("remove", path=link)


def job_prints(fixture: Fixture, player: Player, **changes: Any) -> Outcome:
    """Whether a job ends well and prints something."""
    client = BrokerClient(fixture.settings.broker.socket)
    job_id = client.submit(small_job(**changes), user=player.name)
    job = wait_until_over(client, job_id)
    if job is None:
        raise CarmeError(f"Job {job_id} of {player.name} did not end.")
    text = client.log(job_id, user=player.name).text.strip()
    return job.exit_code == 0 and bool(text), text.splitlines()[-1][:160] if text else str(job.state)


add(
    AREA,
    "workdir by link",
    "runs a job in a working directory that is a link to the victim's home",
    workdir_of_the_victim,
    lambda s: job_prints(s, s.victim, workdir=s.victim.account.home, command=["ls", ".local/share/carme"]),
)
