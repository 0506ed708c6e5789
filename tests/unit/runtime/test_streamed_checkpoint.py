"""The errors of a checkpoint that does not reach all ranks. No ranks here."""

import threading
from typing import Any

import pytest

from carme_runtime.checkpoint.stream import Layout, Stream, pack
from carme_runtime.checkpoint.streamed import Arriving
from patience import HANG


class Alone:
    """Rank 0, as far as it is needed."""

    rank = 0

    def exchange(self, known: Any) -> list[Any]:
        return [known]


class Broken:
    """A group whose messages do not arrive."""

    def broadcast(self, *_: Any, **__: Any) -> "Broken":
        return self

    def wait(self) -> None:
        raise ConnectionError("rank 1 is gone")


def test_rank_0_says_what_went_wrong_on_the_way(caplog: pytest.LogCaptureFixture) -> None:
    held = Stream(pack([]), Layout([([4], "uint8", 0)], 4))
    carrier: Any = (Broken(), 1)
    ranks: Any = Alone()
    with caplog.at_level("WARNING", "carme_runtime"):
        arriving = Arriving(ranks, carrier, held, lambda _: [])
        for thread in threading.enumerate():
            if thread.name == "carme-checkpoint":
                thread.join(HANG)
    arriving.wait_all()  # as all is here
    assert "did not reach all ranks: ConnectionError: rank 1 is gone" in caplog.text
