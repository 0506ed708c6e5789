"""What a comparison found, and its file: written as a whole or not at all."""

import contextlib
import dataclasses
import json
import math
import os
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carme_runtime import strict_json
from carme_runtime.compare.errors import CompareError
from carme_runtime.compare.figures import Estimate, estimate

VERSION = 1
MOST_ROUNDS = 1000  # that --rounds takes
LEAST_TURNS = 3  # undisturbed ones that make a row
MEASURED, DISTURBED, UNCERTAIN, VOID = "measured", "disturbed", "uncertain", "void"


@dataclass(frozen=True)
class Turn:
    """Some steps of a contestant, one after the other.

    Args:
        round: In which they were made; a repeated turn has the round of the one that it stands for.
        ms: The median of its steps.
        reasons: What disturbed it.
        began: When, in seconds since 1970.
        lasted_s: From its first step to its last one.
    """

    round: int
    ms: float
    reasons: tuple[str, ...] = ()
    began: float = 0.0
    lasted_s: float = 0.0


#: Of a weight's gradient in the first step: its `norm`, the `expected` one, the `distance` between both, and
#: how much of that may come from `rounding`: where it decides on which side of a kink a value is, and where
#: the gradient is computed from the weights. All are Euclidean norms.
Distance = dict[str, float]


@dataclass
class Row:
    """A contestant with a network on some ranks."""

    contestant: str
    title: str
    network: str
    ranks: int
    batch: int = 0
    void: str = ""  # why there are no figures
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Distance] = field(default_factory=dict)  # of the first step, by weight
    turns: list[Turn] = field(default_factory=list)
    parts_ms: dict[str, float] = field(default_factory=dict)
    start_s: float = 0.0
    peak_bytes: int = 0
    user_lines: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    step_joules: dict[str, float] = field(default_factory=dict)  # of the first node, by what drew them
    half_loss_steps: int | None = (
        None  # after which the loss was half of the first one; None: it was not reached
    )
    predicted: dict[str, float] = field(default_factory=dict)  # see carme_runtime.compare.predictions
    limit_percent: float = 0.0  # of the median, beyond which its interval makes the row uncertain; 0: never

    @property
    def joules(self) -> float | None:
        """Of a step, on the first node; None: nobody counts them there."""
        return sum(self.step_joules.values()) if self.step_joules else None

    @property
    def used(self) -> list[Turn]:
        """The turns that count: the undisturbed ones, if there are enough."""
        quiet = [turn for turn in self.turns if not turn.reasons]
        return quiet if len(quiet) >= LEAST_TURNS else self.turns

    @property
    def status(self) -> str:
        """`measured`, `disturbed` (the figures are of disturbed turns), `uncertain` or `void`."""
        if self.void or not self.turns:
            return VOID
        if any(turn.reasons for turn in self.used):
            return DISTURBED
        return UNCERTAIN if self.is_wide else MEASURED

    @property
    def is_wide(self) -> bool:
        """Whether its median is known less exactly than the limit."""
        percent = self.step.percent
        return bool(self.limit_percent) and percent is not None and percent > self.limit_percent

    @property
    def step(self) -> Estimate:
        """Milliseconds of a step."""
        return estimate([turn.ms for turn in self.used])

    @property
    def half_loss_s(self) -> Estimate | None:
        """Seconds of training to half of the first loss; None: the steps made do not reach it."""
        return self.step.times(self.half_loss_steps / 1000) if self.half_loss_steps else None

    @property
    def rounds(self) -> dict[int, float]:
        """Milliseconds of a step by round."""
        found: dict[int, list[float]] = {}
        for turn in self.used:
            found.setdefault(turn.round, []).append(turn.ms)
        return {number: statistics.median(times) for number, times in found.items()}

    @property
    def rate(self) -> Estimate:
        """Samples per second."""
        step = self.step
        median, low, high = (1000 * self.batch / ms for ms in (step.median, step.high, step.low))
        return Estimate(median, low, high, step.has_interval)


@dataclass
class Result:
    """A comparison. `options` is what was requested, `noise` how quiet the machine was."""

    created: str
    seed: int
    environment: dict[str, Any]
    options: dict[str, Any]
    data: str = ""
    noise: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def measured(self) -> list[Row]:
        """The rows that have figures."""
        return [row for row in self.rows if row.status != VOID]

    def of(self, network: str, ranks: int) -> list[Row]:
        """The rows with figures of one network, the fastest first."""
        rows = [row for row in self.measured if (row.network, row.ranks) == (network, ranks)]
        return sorted(rows, key=lambda row: row.step.median)

    def networks(self) -> list[str]:
        """In their order."""
        return list(dict.fromkeys(row.network for row in self.rows))

    def ranks(self) -> list[int]:
        """In their order."""
        return sorted({row.ranks for row in self.rows})


def as_dict(result: Result) -> dict[str, Any]:
    """For programs; `version` counts changes of names and meanings."""
    rows = []
    for row in result.rows:
        shown = dataclasses.asdict(row) | {"status": row.status, "joules": row.joules}
        if row.status != VOID:
            shown |= {
                "step_ms": dataclasses.asdict(row.step),
                "samples_per_s": dataclasses.asdict(row.rate),
                "half_loss_s": dataclasses.asdict(row.half_loss_s) if row.half_loss_s else None,
                "deep500": _as_deep500(row),
            }
        rows.append(shown)
    return {"version": VERSION} | dataclasses.asdict(result) | {"rows": rows}


def _as_deep500(row: Row) -> dict[str, Any]:
    """What Deep500 has a metric for, under its name and in its unit.

    `L2Error` is, for each weight in the order of `gradients`, the Euclidean norm of what its gradient in the
    first step differs by from the right one.
    """
    errors = [distance["distance"] for distance in row.gradients.values()]
    return {"WallclockTime": row.step.median / 1000} | ({"L2Error": errors} if errors else {})


def save(result: Result, file: Path) -> None:
    """Raises CompareError."""
    write_whole(file, strict_json.dumps(as_dict(result), indent=1) + "\n")


def load(file: Path) -> Result:
    """Raises CompareError where the file is none of a comparison that this version knows."""
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        raise CompareError(f"{file} cannot be read ({error.strerror}).", "Name another file.") from None
    except ValueError:
        raise _no_result(file) from None
    if not isinstance(found, dict) or "version" not in found or not isinstance(found.get("rows"), list):
        raise _no_result(file)
    if found["version"] != VERSION:
        raise CompareError(
            f"{file} holds a result of version {found['version']}, and this carme_runtime reads version "
            f"{VERSION}.",
            "Compare again.",
        )
    try:
        rows = [_row(each) for each in found.pop("rows")]
        return Result(**{key: value for key, value in found.items() if key != "version"}, rows=rows)
    except (TypeError, KeyError, AttributeError, ValueError):
        raise _no_result(file) from None


def _row(found: dict[str, Any]) -> Row:
    known = {each.name for each in dataclasses.fields(Row)}
    values: dict[str, Any] = {key: value for key, value in found.items() if key in known}
    values["turns"] = [_turn(each) for each in found["turns"]]
    values["losses"] = [_number(loss) for loss in found.get("losses", [])]
    values["gradients"] = {
        weight: {name: _number(value) for name, value in distance.items()}
        for weight, distance in found.get("gradients", {}).items()
    }
    return Row(**values)


def _number(found: float | None) -> float:
    """Of a loss or a gradient, which may be none: JSON has null for that."""
    return math.nan if found is None else float(found)


def _turn(found: dict[str, Any]) -> Turn:
    when = [float(found.get(name, 0.0)) for name in ("began", "lasted_s")]
    ms = float(found["ms"])
    if not 0 < ms < math.inf:
        raise ValueError(f"a step of {ms} ms")
    return Turn(found["round"], ms, tuple(found["reasons"]), *when)


def _no_result(file: Path) -> CompareError:
    return CompareError(f"{file} is not a result of carme compare.", "Name its compare.json.")


def write_whole(file: Path, text: str) -> None:
    """Write a file so that nobody sees a part of it. Raises CompareError."""
    draft = None
    try:
        handle, draft = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(draft).chmod(0o666 & ~mask)
        Path(draft).replace(file)
    except OSError as error:
        if draft:
            with contextlib.suppress(OSError):
                Path(draft).unlink()
        raise CompareError(
            f"{file} cannot be written ({error.strerror}).", "Choose another folder with --output."
        ) from None
