"""A picture of a net in a notebook that follows its run."""

import threading
from typing import TYPE_CHECKING, Any

from carme_runtime.petri.draw import draw
from carme_runtime.petri.errors import PetriError

if TYPE_CHECKING:
    from carme_runtime.petri.run import Run


class Picture(threading.Thread):
    """Redraws a run that has changed, until it is closed.

    Args:
        run: Of the net.
        handle: What IPython's `display` returned, or anything else with `update(drawing)`.
        seconds: Between two pictures at least.
    """

    def __init__(self, run: "Run", handle: Any, seconds: float) -> None:
        super().__init__(name=f"carme-petri-picture-{run.net.name}", daemon=True)
        self._run, self._handle, self._seconds = run, handle, seconds
        self._ended = threading.Event()

    def run(self) -> None:
        """Redraw."""
        last: Any = None
        while True:
            is_last = self._ended.wait(self._seconds)
            status = self._run.status()
            now = status["places"], status["running"], status["fired"]
            if now != last:
                self._handle.update(draw(self._run.net, status))
            last = now
            if is_last:
                return

    def end(self) -> None:
        """Draw the last picture."""
        self._ended.set()
        self.join()


def show(run: "Run", seconds: float) -> Picture:
    """Show a picture that follows a run. Raises PetriError where this is no notebook."""
    try:
        from IPython.display import display  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise PetriError(
            "Pictures that follow a run need IPython.", "Use it in a notebook, or run.follow()."
        ) from None
    picture = Picture(run, display(run.draw(), display_id=True), seconds)
    picture.start()
    return picture
