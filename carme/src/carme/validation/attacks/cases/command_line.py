"""Attacks: the command line."""

from carme.validation.attacks.case import Area, add, on_head
from carme.validation.attacks.cases.node import cancelled

AREA = Area("The command line")

CARME = "/opt/carme/venv/bin/carme"
for name, what, arguments, texts in (
    ("logs", "reads the victim's log", ["logs", "JOB"], []),
    ("jobs", "finds the victim's job in its list", ["jobs", "--all-states", "--json"], ["session-SESSION"]),
    ("session show", "shows the victim's session", ["session", "show", "SESSION"], []),
    ("session list", "finds it in the list of sessions", ["session", "list", "--json"], ["SESSION"]),
    ("session extend", "prolongs it", ["session", "extend", "SESSION", "1"], []),
):
    on_head(
        AREA,
        name,
        what,
        "run",
        lambda s, arguments=arguments, texts=texts: {
            "arguments": [
                CARME,
                *(w.replace("JOB", str(s.job_id)).replace("SESSION", s.victim.session) for w in arguments),
            ],
            "texts": [w.replace("SESSION", s.victim.session) for w in texts],
        },
    )
on_head(
    AREA,
    "session shell",
    "opens a shell in the victim's session",
    "run",
    lambda s: {
        "arguments": [CARME, "session", "shell", s.victim.session],
        "texts": [f"uid={s.victim.account.uid}"],
        "stdin": "id\nexit\n",
    },
)
for name, what, arguments in (
    ("cancel", "cancels the victim's job", ["cancel", "JOB"]),
    ("session stop", "stops the victim's session", ["session", "stop", "SESSION"]),
):
    add(
        AREA,
        name,
        what,
        lambda s, a=arguments: s.attacker_head.run(
            "run",
            arguments=[
                CARME,
                *(w.replace("JOB", str(s.job_id)).replace("SESSION", s.victim.session) for w in a),
            ],
            texts=[],
        ),
        lambda s: cancelled(
            s,
            s.victim,
            lambda job: s.victim_head.run("run", arguments=[CARME, "cancel", str(job)], texts=[]),
        ),
    )
