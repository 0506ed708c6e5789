"""Messages of any length between ranks, made of notified writes into one segment that all ranks have.

Each rank has a window of slots for every other rank, and as much room for what it sends. A frame is written
into a free slot of the receiver, with the slot's number as notification; when the receiver has taken it out,
it notifies the sender, who may then use the slot again.
"""

import contextlib
import mmap
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

from carme_runtime.collectives.errors import GaspiError, PeerLost

SLOTS = 4
LARGEST_FRAME, SMALLEST_FRAME = 256 * 1024, 4096
MEMORY = (
    128 * 2**20
)  # at most so many bytes for all windows, if frames are not to be smaller than the smallest
HEAD = struct.Struct("<QQQI")  # number of the frame, key and length of its message, bytes of it in this frame
SLICE = 200  # milliseconds after which a waiting thread looks around
# GPI-2 waits for notifications without letting go of the processor. So a thread that has found none for a
# while looks now and then.
_WAIT_MS, _WAITS, _LONGEST_PAUSE = 1, 2, 0.001
ABORTS = 0  # the key of messages about groups that broke


class Segments(Protocol):
    """What messages need of a process that is a rank of GPI-2. Times are in milliseconds."""

    rank: int
    size: int

    def make_segment(self, number: int, size: int) -> mmap.mmap:
        """Memory of this process as a segment, of so many bytes."""
        ...

    def segment_register_reserved(self, number: int, rank: int, timeout: int) -> None:
        """Make a segment of this rank known to another. Raises Timeout."""
        ...

    def wait_for_all(self, timeout: int) -> None:
        """Wait until all ranks have come here. Raises Timeout."""
        ...

    def post(
        self, function: str, rank: int, queue: int, arguments: tuple[Any, ...], entries: int = 1
    ) -> None:
        """Put an operation that needs so many entries into a queue."""
        ...

    def waitsome(self, segment: int, first: int, count: int, timeout: int) -> int:
        """Which notification is set, or -1."""
        ...

    def reset(self, segment: int, number: int) -> int:
        """Clear a notification, return its value."""
        ...

    def ping(self, rank: int) -> bool:
        """Whether a rank is there."""
        ...

    def throw_if_lost(self, rank: int, doing: str) -> None:
        """Raise PeerLost where it is."""
        ...


class Mail:
    """Sends and takes messages. Each has a key: messages of one key and sender keep their order."""

    def __init__(self, context: Segments, segment: int, queue: int, timeout: int) -> None:
        self._context, self._segment, self._queue = context, segment, queue
        ranks = context.size
        self._frame = min(LARGEST_FRAME, max(SMALLEST_FRAME, MEMORY // (2 * ranks * SLOTS)))
        self._windows = ranks * SLOTS  # also the notifications that say that a frame has come
        half = self._windows * self._frame
        self._memory = memoryview(context.make_segment(segment, 2 * half)).cast("B")
        self._inboxes: dict[tuple[int, int], deque[bytearray]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._free: list[set[int]] = [set(range(SLOTS)) for _ in range(ranks)]
        self._sending = [threading.Lock() for _ in range(ranks)]
        self._sent = [0] * ranks
        self._expected = [0] * ranks
        self._early: dict[tuple[int, int], bytes] = {}  # by sender and number
        self._partial: list[tuple[int, int, bytearray] | None] = [None] * ranks
        self._closed = False
        self._wakes = 0
        self.on_message: Callable[[int, bytes], None] = lambda sender, content: None
        for rank in range(ranks):
            if rank != context.rank:
                context.segment_register_reserved(segment, rank, timeout)
        context.wait_for_all(timeout)  # nobody writes into a window that is not there yet
        self._thread = threading.Thread(target=self._work, name="carme-gpi2", daemon=True)

    def start(self) -> None:
        """Begin to take frames."""
        self._thread.start()

    def close(self) -> None:
        """Take no more frames."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def drain(self, deadline: float) -> bool:
        """Wait until all ranks that are not lost have taken what was sent to them; False: not in time."""
        for rank in range(self._context.size):
            while self._context.ping(rank):
                with self._changed:
                    left = min(SLICE / 1000, deadline - time.monotonic())
                    if self._changed.wait_for(lambda: len(self._free[rank]) == SLOTS, max(left, 0)):  # noqa: B023
                        break
                if left <= 0:
                    return False
        return True

    def post(self, rank: int, key: int, parts: "list[Any]", deadline: float | None = None) -> bool:
        """Send one message made of buffers; False when its first frame found no room in time.

        Raises PeerLost.
        """
        views = [view for view in (memoryview(part).cast("B") for part in parts) if view.nbytes]
        total = sum(view.nbytes for view in views)
        if rank == self._context.rank:
            with self._changed:
                self._inboxes[rank, key].append(bytearray(b"".join(views)))
                self._changed.notify_all()
            return True
        with self._sending[rank]:
            left, room = total, self._frame - HEAD.size
            while True:
                slot = self._take_slot(rank, deadline)
                if slot is None:
                    return False
                deadline = None  # what has begun is ended: half a message is of no use
                at = (self._windows + rank * SLOTS + slot) * self._frame
                size = min(left, room)
                HEAD.pack_into(self._memory, at, self._sent[rank], key, total, size)
                self._sent[rank] += 1
                to = at + HEAD.size
                end = to + size
                while to < end:
                    piece = min(end - to, views[0].nbytes)
                    self._memory[to : to + piece] = views[0][:piece]
                    to += piece
                    views[0] = views[0][piece:]
                    if not views[0].nbytes:
                        views.pop(0)
                there = (self._context.rank * SLOTS + slot) * self._frame
                number = self._context.rank * SLOTS + slot
                self._context.post(
                    "write_notify",
                    rank,
                    self._queue,
                    (self._segment, at, rank, self._segment, there, HEAD.size + size, number, 1),
                    entries=2,
                )
                left -= size
                if not left:
                    return True

    def take(
        self, rank: int, key: int, deadline: float | None, check: Callable[[], None] = lambda: None
    ) -> bytearray | None:
        """The next message of `rank`, or None when the time is over. `check` is called now and then.

        Raises PeerLost, and what `check` raises.
        """
        inbox = self._inboxes[rank, key]
        with self._changed:
            while not inbox:
                self._wait(deadline, lambda: bool(inbox), check, rank)
                if not inbox and deadline is not None and time.monotonic() >= deadline:
                    return None
            return inbox.popleft()

    def take_any(self, key: int, deadline: float | None) -> tuple[int, bytearray] | None:
        """The next message of any rank, and who sent it."""
        inboxes = [self._inboxes[rank, key] for rank in range(self._context.size)]
        with self._changed:
            while True:
                for rank, inbox in enumerate(inboxes):
                    if inbox:
                        return rank, inbox.popleft()
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                self._wait(deadline, lambda: any(inboxes), lambda: None, None)

    def poll(self, rank: int, key: int) -> bytearray | None:
        """The next message of `rank` if it is there."""
        with self._changed:
            inbox = self._inboxes[rank, key]
            return inbox.popleft() if inbox else None

    def waiting(self, rank: int, key: int) -> int:
        """How many messages of `rank` are there."""
        with self._changed:
            return len(self._inboxes[rank, key])

    def wake(self) -> None:
        """Let those who wait call their `check`."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def forget(self, keys: set[int]) -> None:
        """Drop what has come for keys that nobody will ask for."""
        with self._changed:
            for rank, key in list(self._inboxes):
                if key in keys:
                    del self._inboxes[rank, key]

    def _wait(
        self,
        deadline: float | None,
        ready: Callable[[], bool],
        check: Callable[[], None],
        rank: int | None,
    ) -> None:
        """Wait for a while, with `_changed` held."""
        check()
        if self._closed:
            raise PeerLost("This rank has left the run.", "Start the run again.")
        left = SLICE / 1000 if deadline is None else min(SLICE / 1000, deadline - time.monotonic())
        wakes = self._wakes
        if left <= 0 or self._changed.wait_for(lambda: ready() or wakes != self._wakes, left) or rank is None:
            return
        # Nothing came for a while: see whether the other still runs.
        if not self._context.ping(rank):
            check()  # what it reported before it left
            self._context.throw_if_lost(rank, "a message")

    def _take_slot(self, rank: int, deadline: float | None) -> int | None:
        free = self._free[rank]
        with self._changed:
            while not free:
                self._wait(deadline, lambda: bool(free), lambda: None, rank)
                if not free and deadline is not None and time.monotonic() >= deadline:
                    return None
            return free.pop()

    def _work(self) -> None:
        quiet = 0  # looks without a notification
        while not self._closed:
            try:
                wait = _WAIT_MS if quiet < _WAITS else 0
                found = self._context.waitsome(self._segment, 0, 2 * self._windows, wait)
                if found < 0:
                    quiet += 1
                    if not wait:
                        time.sleep(min(quiet * _LONGEST_PAUSE / 10, _LONGEST_PAUSE))
                    continue
                quiet = 0
                if not self._context.reset(self._segment, found):
                    continue
                sender, slot = divmod(found % self._windows, SLOTS)
                if found >= self._windows:
                    with self._changed:
                        self._free[sender].add(slot)
                        self._changed.notify_all()
                else:
                    self._take_frame(sender, slot, found)
            except GaspiError:
                if self._closed:
                    return
                time.sleep(SLICE / 1000)  # of a peer that is gone; who waits for it learns that by pings

    def _take_frame(self, sender: int, slot: int, number: int) -> None:
        at = number * self._frame
        frame, key, total, size = HEAD.unpack_from(self._memory, at)
        content = bytes(self._memory[at + HEAD.size : at + HEAD.size + size])
        self._early[sender, frame] = struct.pack("<QQ", key, total) + content
        while (ready := self._early.pop((sender, self._expected[sender]), None)) is not None:
            self._expected[sender] += 1
            key, total = struct.unpack_from("<QQ", ready)
            partial = self._partial[sender] or (key, total, bytearray())
            partial[2].extend(memoryview(ready)[16:])
            self._partial[sender] = partial
            if len(partial[2]) == partial[1]:
                self._partial[sender] = None
                self._deliver(sender, partial[0], partial[2])
        # Last: who has sent it may leave then, and what it has sent is to be here before it is missed.
        with contextlib.suppress(GaspiError):  # of one that is gone
            credit = self._windows + self._context.rank * SLOTS + slot
            self._context.post("notify", sender, self._queue, (self._segment, sender, credit, 1))

    def _deliver(self, sender: int, key: int, message: bytearray) -> None:
        if key == ABORTS:
            self.on_message(sender, bytes(message))
            return
        with self._changed:
            self._inboxes[sender, key].append(message)
            self._changed.notify_all()
