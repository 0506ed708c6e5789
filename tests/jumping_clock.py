"""A plugin of pytest: the time of day jumps whenever a test or what it tests asks for it.

    python -m pytest -p jumping_clock tests/unit/webui

A busy machine takes its time between two questions. Each test begins just before a full minute, and each
question costs 1.5 s: whatever is right only within the same minute, or has no margin, fails here each time
and not once in a year. CARME_CLOCK names another moment of the day (UTC) at which each test begins, such as
23:59:58, or of the hour, such as 59:58; CARME_CLOCK_STEP the seconds of a question. The monotonic clock goes
on as it is, and other processes have the real time.
"""

import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime, tzinfo
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

__all__ = ["JumpingClock"]

ROOT = Path(__file__).resolve().parents[1]


class JumpingClock:
    """Gives the time, each time later by a step.

    Args:
        begin: Its first answer, in seconds since 1970.
        step: Seconds.
    """

    def __init__(self, begin: float, step: float) -> None:
        self._real = time.time
        self._shift = begin - self._real()
        self._step = step

    def __call__(self) -> float:
        """Seconds since 1970."""
        answer = self._real() + self._shift
        self._shift += self._step
        return answer


def next_moment(now: float, named: str) -> float:
    """The next moment with this time of day, given by its last parts: SS, MM:SS or HH:MM:SS in UTC.

    Args:
        now: Seconds since 1970.
        named: The parts.

    Raises:
        ValueError: They are not numbers, or more than three.
    """
    parts = [float(part) for part in named.split(":")]
    if len(parts) > 3:
        raise ValueError(f"CARME_CLOCK is {named!r}; it must be SS, MM:SS or HH:MM:SS.")
    wanted, period = 0.0, 1
    for place, part in enumerate(reversed(parts)):
        wanted += part * 60**place
        period = (60, 3600, 86400)[place]
    return now + (wanted - now) % period


class _Moments(type):
    """Instances of the real type count as instances here."""

    def __instancecheck__(cls, found: object) -> bool:
        return isinstance(found, datetime)

    def __call__(cls, *arguments: Any, **values: Any) -> Any:
        return datetime(*arguments, **values)

    def __getattribute__(cls, name: str) -> Any:
        return type.__getattribute__(cls, name) if name in ("now", "__class__") else getattr(datetime, name)


def _type_of(clock: JumpingClock) -> type:
    class Moment(datetime, metaclass=_Moments):
        @staticmethod
        def now(tz: tzinfo | None = None) -> datetime:  # pyright: ignore[reportIncompatibleMethodOverride]
            return datetime.fromtimestamp(clock(), tz)

    return Moment


def _is_changed(name: str, module: ModuleType) -> bool:
    """Whether the module is part of Carme or Django."""
    file = getattr(module, "__file__", None) or ""
    is_ours = Path(file).is_relative_to(ROOT) and "site-packages" not in file
    return is_ours or name.startswith("django.")


@pytest.fixture(autouse=True)
def _jumping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    begin = next_moment(time.time(), os.environ.get("CARME_CLOCK", "59"))
    clock = JumpingClock(begin, float(os.environ.get("CARME_CLOCK_STEP", "1.5")))
    moment = _type_of(clock)
    for name, module in [*sys.modules.items()]:
        if vars(module).get("datetime") is datetime and name != __name__ and _is_changed(name, module):
            monkeypatch.setattr(module, "datetime", moment)
    monkeypatch.setattr(time, "time", clock)
    yield
