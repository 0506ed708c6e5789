"""A picture of a net in a notebook that follows its run."""

import threading
import weakref
from typing import TYPE_CHECKING, Any

from carme_runtime.petri.draw import draw
from carme_runtime.petri.errors import PetriError

if TYPE_CHECKING:
    from carme_runtime.petri.observed import Observed


class Picture(threading.Thread):
    """Redraws a run that has changed, until it is closed or nobody has it any more.

    Args:
        run: Of the net.
        handle: What IPython's `display` returned, or anything else with `update(drawing)`.
        seconds: Between two pictures at least.
    """

    def __init__(self, run: "Observed", handle: Any, seconds: float) -> None:
        super().__init__(name=f"carme-petri-picture-{run.net.name}", daemon=True)
        self._net, self._handle, self._seconds = run.net, handle, seconds
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
            now = status["places"], status["running"], status["fired"]
            if now != last:
                self._handle.update(draw(self._net, status))
            last = now
            if is_last:
                return

    def end(self) -> None:
        """Draw the last picture."""
        self._ended.set()
        self.join()


def show(run: "Observed", seconds: float) -> Picture:
    """Show a picture that follows a run. Raises PetriError where this is no notebook."""
    try:
        from IPython.display import display  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise PetriError(
            "Pictures that follow a run need IPython.", "Use it in a notebook, or run.follow()."
        ) from None
    handle = display(run.draw(), display_id=True)
    if handle is None:  # there is no frontend that could show more than text
        raise PetriError("This is no notebook, so no picture can follow a run.", "Use run.follow().")
    picture = Picture(run, handle, seconds)
    picture.start()
    return picture
