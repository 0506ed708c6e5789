"""Pictures of a net that follow its run: in a notebook, and on the page of its job."""

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from carme_runtime.petri.definition import Definition
from carme_runtime.petri.draw import Drawing, draw
from carme_runtime.petri.errors import PetriError

#: What the page of a job shows of its net lies in the job's folder, which this variable names.
JOB_FOLDER, PAGE = "CARME_JOB_FOLDER", "net.json"
#: Seconds between two pictures for a job's page, and the longest drawing, message and name there.
_PAGE_SECONDS, _MOST_DRAWN, _MOST_LETTERS, _MOST_NAME = 2.0, 256 * 1024, 2000, 200
_MOST_BYTES = 1 << 20  # of all that; the broker reads no more


class Drawn(Protocol):
    """What pictures need of a run (`carme_runtime.petri.observed.Observed`)."""

    net: Definition

    def status(self) -> dict[str, Any]:
        """The state of the run in plain values."""
        ...

    def draw(self) -> Drawing:
        """The net with the tokens and tasks that it has now."""
        ...


class Picture(threading.Thread):
    """Redraws a run that has changed, until it is closed or nobody has it any more.

    Args:
        run: Of the net.
        show: Shows a drawing; it gets the run's status, too.
        seconds: Between two pictures at least.
    """

    def __init__(self, run: Drawn, show: Callable[[Drawing, dict[str, Any]], None], seconds: float) -> None:
        super().__init__(name=f"carme-petri-picture-{run.net.name}", daemon=True)
        self._net, self._show, self._seconds = run.net, show, seconds
        self._run = weakref.ref(run)  # a picture alone does not keep a run
        self._ended = threading.Event()

    def run(self) -> None:
        """Redraw."""
        last: Any = None
        while True:
            is_last = self._ended.wait(self._seconds)
            run = self._run()
            if run is None:
                return
            status = run.status()
            del run
            now = status["places"], status["running"], status["fired"], status["state"]
            if now != last:
                self._show(draw(self._net, status), status)
            last = now
            if is_last:
                return

    def end(self) -> None:
        """Draw the last picture."""
        self._ended.set()
        self.join()


def show(run: Drawn, seconds: float) -> Picture:
    """Show a picture that follows a run. Raises PetriError where this is not a notebook."""
    try:
        from IPython.display import display  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise PetriError(
            "Pictures that follow a run need IPython.", "Use it in a notebook, or run.follow()."
        ) from None
    handle = display(run.draw(), display_id=True)
    if handle is None:  # there is no frontend that could show more than text
        raise PetriError("This is not a notebook, so no picture can follow a run.", "Use run.follow().")
    picture = Picture(run, lambda drawing, _: handle.update(drawing), seconds)
    picture.start()
    return picture


def publish(run: Drawn) -> Picture | None:
    """Let the page of the job in which this program runs follow the run; None outside of Carme's jobs."""
    folder = os.environ.get(JOB_FOLDER, "")
    if not folder or not os.access(folder, os.W_OK):
        return None
    file = Path(folder, PAGE)
    picture = Picture(run, lambda drawing, status: _write(file, drawing, status), _PAGE_SECONDS)
    picture.start()
    return picture


def _write(file: Path, drawing: Drawing, status: dict[str, Any]) -> None:
    """Replace what the page shows; a run never fails for want of it."""
    sums = {name: sum(status[name].values()) for name in ("running", "fired", "places")}
    shown = {
        "name": status["net"][:_MOST_NAME],
        "state": status["state"],
        "error": status["error"][:_MOST_LETTERS],
        "at": time.time(),
        "running": sums["running"],
        "ended": sums["fired"],
        "tokens": sums["places"],
        "svg": drawing if len(drawing) <= _MOST_DRAWN else "",
    }
    text = json.dumps(shown)  # of ASCII: a letter of the drawing may be six bytes
    if len(text) > _MOST_BYTES:
        text = json.dumps(shown | {"svg": ""})
    # Each run writes in a thread of its own: two runs of one process do not meet in a draft.
    draft = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    with contextlib.suppress(OSError):
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
