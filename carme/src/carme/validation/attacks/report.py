"""What became of each attack, for programs and for people."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from carme.errors import CarmeError
from carme.validation.attacks.case import Attack, Deed
from carme.validation.attacks.moves import Outcome
from carme.validation.attacks.scene import Scene, evidence


@dataclass(frozen=True)
class Result:
    """One line of the report.

    `ok`: the attack was stopped, and its control worked. `how` says what stopped it, `control` what the same
    thing brought to who may do it. `seconds` is the wall time of both.
    """

    name: str
    area: str
    what: str
    ok: bool
    stopped: bool
    how: str
    control: str
    seconds: float


def carry_out(attack: Attack, scene: Scene) -> Result:
    """Make one attack and its control."""
    begin = time.monotonic()
    reached, how = _outcome(attack.attack, scene, failed=True)
    worked, control = _outcome(attack.control, scene, failed=False)
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


def _outcome(deed: Deed, scene: Scene, failed: bool) -> Outcome:
    """What a deed brought; one that could not be done counts against the site."""
    try:
        return deed(scene)
    except CarmeError as error:
        return failed, f"could not be tried: {error}"
    # An attack may break anything, and what it broke must not keep the others from being made and told.
    except Exception as error:
        return failed, f"could not be tried: {type(error).__name__}: {error}"


def verdict(attacks: Iterable[Attack], scene: Scene, tell: Callable[[str], None]) -> dict[str, Any]:
    """Make all attacks; the verdict as plain data. `tell` gets a line for each."""
    results = []
    for attack in attacks:
        if attack.needs_gpus and not scene.victims_gpus:
            continue
        if attack.needs_metrics and not scene.settings.monitoring.prometheus:
            continue
        result = carry_out(attack, scene)
        results.append(result)
        word = "stopped  " if result.ok else "REACHED  " if not result.stopped else "NO CONTROL"
        tell(f"{word} {result.seconds:5.1f} s  {result.name}: {result.how if result.ok else shown(result)}")
    return {
        "ok": all(result.ok for result in results),
        "scene": evidence(scene),
        "attacks": [asdict(result) for result in results],
        "checks": [as_check(result) for result in results],
    }


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
    scene, attacks = report["scene"], report["attacks"]
    stopped = sum(attack["ok"] for attack in attacks)
    lines = [
        "# One user's attacks on another",
        "",
        f"{scene['attacker']} against {scene['victim']}, both at work on node {scene['node']}: {stopped} of "
        f"{len(attacks)} attacks were stopped, and in each of these the same thing worked for who may do it.",
        "",
        "| | attack: the attacker ... | stopped by | control |",
        "|---|---|---|---|",
    ]
    for attack in attacks:
        mark = "stopped" if attack["ok"] else "**not stopped**" if not attack["stopped"] else "**no control**"
        cells = [mark, f"{attack['area']}: {attack['what']}", attack["how"], attack["control"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
