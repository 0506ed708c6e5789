"""How fast a run is and what is left, in figures and in words."""

from __future__ import annotations

import time

from carme.staging.options import Progress
from carme.wording import size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Rates", "duration", "progress_text"]


class Rates:
    """Rates over the last seconds."""

    def __init__(self) -> None:
        self.recent: list[tuple[float, int, int]] = []

    def __call__(self, progress: Progress) -> dict[str, Any]:
        """The rate now and, where the total is known, what is left, by the names of the JSON events."""
        counts = progress.counts
        done = counts.bytes_copied + counts.bytes_unchanged
        self.recent = [*self.recent[-20:], (time.monotonic(), done, counts.files)]
        (start, first, first_files), (now, last, last_files) = self.recent[0], self.recent[-1]
        span = max(now - start, 0.001)
        left = None
        if progress.total_bytes is not None and progress.total_files is not None and progress.seconds > 1:
            # Many small files take the time of files, few large ones that of bytes: the slower counts.
            shares = [
                (progress.total_bytes - last, (last - first) / span),
                (progress.total_files - last_files, (last_files - first_files) / span),
            ]
            if all(rate > 0 or rest <= 0 for rest, rate in shares):
                left = round(max((rest / rate if rest > 0 else 0.0) for rest, rate in shares), 1)
        return {
            "bytes_per_second": round((last - first) / span),
            "files_per_second": round((last_files - first_files) / span, 1),
            "total_bytes": progress.total_bytes,
            "total_files": progress.total_files,
            "seconds_left": left,
        }


def progress_text(progress: Progress, rates: dict[str, Any]) -> str:
    """One line without its end: how far, how much, how fast, how long still."""
    counts = progress.counts
    done = counts.bytes_copied + counts.bytes_unchanged
    text = f"{counts.files} files, {size(done)}, {size(rates['bytes_per_second'])}/s"
    if total := progress.total_bytes:
        text = f"{min(100, 100 * done // total)} %, {text}"
        if rates["seconds_left"] is not None:
            text += f", {duration(rates['seconds_left'])} left"
    return text


def duration(seconds: float) -> str:
    """A time span for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
