"""What became of each attack, for programs and for people."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from carme.errors import CarmeError
from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.case import Attack, Step
from carme.validation.attacks.fixture import Fixture, evidence


@dataclass(frozen=True)
class Result:
    """One line of the report.

    `ok`: the attack was stopped, and its control worked. `how` says what stopped it, `control` what the same
    thing brought to a user who may do it. `seconds` is the wall time of both.
    """

    name: str
    area: str
    what: str
    ok: bool
    stopped: bool
    how: str
    control: str
    seconds: float


def run_attack(attack: Attack, fixture: Fixture) -> Result:
    """Make one attack and its control."""
    begin = time.monotonic()
    reached, how = _outcome(attack.attack, fixture, failed=True)
    worked, control = _outcome(attack.control, fixture, failed=False)
    return Result(
        name=f"{attack.area}: {attack.name}",
        area=attack.area,
        what=attack.what,
        ok=worked and not reached,
        stopped=not reached,
        how=how,
        control=control,
        seconds=round(time.monotonic() - begin, 2),
    )


def _outcome(step: Step, fixture: Fixture, failed: bool) -> Outcome:
    """What a step brought; one that could not be done counts against the site."""
    try:
        return step(fixture)
    except CarmeError as error:
        return failed, f"could not be tried: {error}"
    # An attack may break anything, and what it broke must not keep the others from being made and reported.
    except Exception as error:
        return failed, f"could not be tried: {type(error).__name__}: {error}"


def verdict(attacks: Iterable[Attack], fixture: Fixture, report: Callable[[str], None]) -> dict[str, Any]:
    """Make all attacks; the verdict as plain data. `report` gets a line for each."""
    results = []
    left_out: dict[str, str] = {}
    for attack in attacks:
        if reason := _missing(attack, fixture):
            left_out[f"{attack.area}: {attack.name}"] = reason
            report(f"left out           {attack.area}: {attack.name}: {reason}")
            continue
        result = run_attack(attack, fixture)
        results.append(result)
        word = "stopped  " if result.ok else "REACHED  " if not result.stopped else "NO CONTROL"
        report(f"{word} {result.seconds:5.1f} s  {result.name}: {result.how if result.ok else shown(result)}")
    return {
        "ok": all(result.ok for result in results),
        "fixture": evidence(fixture),
        "attacks": [asdict(result) for result in results],
        "left_out": left_out,
        "checks": [as_check(result) for result in results],
    }


def _missing(attack: Attack, fixture: Fixture) -> str:
    """What the site does not have and the attack needs; empty where it has all."""
    if attack.needs_gpus and not fixture.victims_gpus:
        return "the sessions have no GPUs"
    if attack.needs_metrics and not fixture.settings.monitoring.prometheus:
        return "the site has no Prometheus"
    return ""


def as_check(result: Result) -> dict[str, Any]:
    """An attack as one of the checks of a site."""
    return {
        "name": f"attack, {result.name}",
        "ok": result.ok,
        "detail": f"stopped: {result.how}" if result.ok else shown(result),
        "remedy": "" if result.ok else "See docs/admins/security.md.",
        "seconds": result.seconds,
    }


def shown(result: Result) -> str:
    """All that is known about an attack that went wrong."""
    return f"{result.how} (control: {result.control})"


def markdown(report: dict[str, Any]) -> str:
    """The report as a page with one table."""
    fixture, attacks = report["fixture"], report["attacks"]
    stopped = sum(attack["ok"] for attack in attacks)
    lines = [
        "# One user's attacks on another",
        "",
        f"{fixture['attacker']} against {fixture['victim']}, both at work on node {fixture['node']}: "
        f"{stopped} of {len(attacks)} attacks were stopped, and each worked for a user who may do it.",
        "",
        "| | attack: the attacker ... | stopped by | control |",
        "|---|---|---|---|",
    ]
    for attack in attacks:
        mark = "stopped" if attack["ok"] else "**not stopped**" if not attack["stopped"] else "**no control**"
        cells = [mark, f"{attack['area']}: {attack['what']}", attack["how"], attack["control"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    if left_out := report["left_out"]:
        lines += ["", "Left out:", ""]
        lines += [f"- {name}: {reason}" for name, reason in left_out.items()]
    return "\n".join(lines) + "\n"
