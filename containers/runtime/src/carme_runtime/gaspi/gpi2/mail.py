"""Messages of any length between ranks, made of notified writes into one segment that all ranks have.

Each rank has a window of slots for every other rank, and as much room for what it sends. A frame is written
into a free slot of the receiver, with the slot's number as notification; when the receiver has taken it out,
it notifies the sender, who may then use the slot again. A message whose sender's time is over ends with the
frames that were sent: the next one, which begins with its first byte, takes its place.
"""

import bisect
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
# Number of the frame; key and length of its message; where in it this frame begins, and how many bytes it has
HEAD = struct.Struct("<QQQQI")
_OF_MESSAGE = struct.Struct("<QQQ")  # key and length of the message, and where in it a frame begins
SLICE = 200  # milliseconds after which a waiting thread looks around
# GPI-2 waits for notifications without letting go of the processor. So a thread that has found none for a
# while looks now and then.
_WAIT_MS, _WAITS, _LONGEST_PAUSE = 1, 2, 0.001
_GRACE = 1.0  # seconds that a rank which takes a message has at least for each further frame
KEYS_OF_GROUP = 2**33  # from a group's key on, so many are of its messages
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
        self._forgotten: deque[int] = deque()
        self._ended: list[int] = []  # keys of groups, sorted
        self._to_post = 0
        self._free: list[set[int]] = [set(range(SLOTS)) for _ in range(ranks)]
        self._sending = [threading.Lock() for _ in range(ranks)]
        self._sent = [0] * ranks
        self._expected = [0] * ranks
        self._early: dict[tuple[int, int], bytes] = {}  # by sender and number
        self._partial: list[bytearray | None] = [None] * ranks
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
        with self._changed:
            if not self._changed.wait_for(lambda: not self._to_post, max(deadline - time.monotonic(), 0)):
                return False
        for rank in range(self._context.size):
            while self._context.ping(rank):
                with self._changed:
                    left = min(SLICE / 1000, deadline - time.monotonic())
                    if self._changed.wait_for(lambda: len(self._free[rank]) == SLOTS, max(left, 0)):  # noqa: B023
                        break
                if left <= 0:
                    return False
        return True

    def will_post(self) -> None:
        """Let `drain` wait for a message that a thread is to post, until `has_posted`."""
        with self._changed:
            self._to_post += 1

    def has_posted(self) -> None:
        """What `will_post` has announced is posted, or has failed."""
        with self._changed:
            self._to_post -= 1
            self._changed.notify_all()

    def post(
        self,
        rank: int,
        key: int,
        parts: "list[Any]",
        deadline: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Send one message made of buffers; False when it found no room in time: then it does not arrive.

        What has begun goes on as long as the receiver takes it. `check` is called now and then while there is
        no room.

        Raises PeerLost, and what `check` raises.
        """
        views = [view for view in (memoryview(part).cast("B") for part in parts) if view.nbytes]
        if rank == self._context.rank:
            with self._changed:
                self._inboxes[rank, key].append(bytearray(b"".join(views)))
                self._changed.notify_all()
            return True
        while not self._sending[rank].acquire(timeout=max(_left(deadline), 0)):
            check()
            if _is_over(deadline):
                return False
        try:
            return self._post_frames(rank, key, views, deadline, check)
        finally:
            self._sending[rank].release()

    def _post_frames(
        self,
        rank: int,
        key: int,
        views: "list[memoryview]",
        deadline: float | None,
        check: Callable[[], None],
    ) -> bool:
        sent, total, room = 0, sum(view.nbytes for view in views), self._frame - HEAD.size
        while True:
            slot = self._take_slot(rank, deadline, check)
            if slot is None:
                return False
            at = (self._windows + rank * SLOTS + slot) * self._frame
            size = min(total - sent, room)
            HEAD.pack_into(self._memory, at, self._sent[rank], key, total, sent, size)
            to = at + HEAD.size
            end = to + size
            while to < end:
                piece = min(end - to, views[0].nbytes)
                self._memory[to : to + piece] = views[0][:piece]
                to += piece
                views[0] = views[0][piece:]
                if not views[0].nbytes:
                    views.pop(0)
            remote_offset = (self._context.rank * SLOTS + slot) * self._frame
            number = self._context.rank * SLOTS + slot
            try:
                self._context.post(
                    "write_notify",
                    rank,
                    self._queue,
                    (self._segment, at, rank, self._segment, remote_offset, HEAD.size + size, number, 1),
                    entries=2,
                )
            except GaspiError:
                self._add_slot(rank, slot)
                raise
            self._sent[rank] += 1
            sent += size
            if sent == total:
                return True
            if deadline is not None:
                deadline = max(deadline, time.monotonic() + _GRACE)

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
                if not inbox and _is_over(deadline):
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
                if _is_over(deadline):
                    return None
                self._wait(deadline, lambda: any(inboxes), lambda: None, None)

    def poll(self, rank: int, key: int) -> bytearray | None:
        """The next message of `rank` if it is there."""
        with self._changed:
            inbox = self._inboxes.get((rank, key))
            return inbox.popleft() if inbox else None

    def waiting(self, rank: int, key: int) -> int:
        """How many messages of `rank` are there."""
        with self._changed:
            return len(self._inboxes.get((rank, key), ()))

    def wait_for(
        self,
        rank: int,
        key: int,
        deadline: float | None,
        ready: Callable[[], bool],
        check: Callable[[], None],
    ) -> None:
        """Wait for a while, until a message of `rank` is there, or `ready` after somebody has called `wake`.

        Raises PeerLost, and what `check` raises.
        """
        with self._changed:
            if not self._inboxes.get((rank, key)) and not ready():
                self._wait(deadline, lambda: bool(self._inboxes.get((rank, key))) or ready(), check, rank)

    def wake(self) -> None:
        """Let those who wait call their `check`."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def forget(self, group_key: int) -> None:
        """Drop soon what has come for a group that has ended, and what still comes. Takes no lock."""
        self._forgotten.append(group_key)

    def _drop_forgotten(self) -> None:
        with self._changed:
            while self._forgotten:
                first = self._forgotten.popleft()
                bisect.insort(self._ended, first)
                for rank, key in list(self._inboxes):
                    if (key - first) % 2**64 < KEYS_OF_GROUP:
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
        left, wakes = _left(deadline), self._wakes
        if left <= 0 or self._changed.wait_for(lambda: ready() or wakes != self._wakes, left) or rank is None:
            return
        # Nothing came for a while: see whether the other still runs.
        if not self._context.ping(rank):
            check()  # what it reported before it left
            self._context.throw_if_lost(rank, "a message")

    def _take_slot(self, rank: int, deadline: float | None, check: Callable[[], None]) -> int | None:
        free = self._free[rank]
        with self._changed:
            while not free:
                self._wait(deadline, lambda: bool(free), check, rank)
                if not free and _is_over(deadline):
                    return None
            return free.pop()

    def _add_slot(self, rank: int, slot: int) -> None:
        with self._changed:
            self._free[rank].add(slot)
            self._changed.notify_all()

    def _work(self) -> None:
        quiet = 0  # looks without a notification
        while not self._closed:
            if self._forgotten:
                self._drop_forgotten()
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
                    self._add_slot(sender, slot)
                else:
                    self._take_frame(sender, slot, found)
            except GaspiError:
                if self._closed:
                    return
                time.sleep(SLICE / 1000)  # of a peer that is gone; who waits for it learns that by pings

    def _take_frame(self, sender: int, slot: int, number: int) -> None:
        at = number * self._frame
        frame, key, total, begin, size = HEAD.unpack_from(self._memory, at)
        content = bytes(self._memory[at + HEAD.size : at + HEAD.size + size])
        self._early[sender, frame] = _OF_MESSAGE.pack(key, total, begin) + content
        while (ready := self._early.pop((sender, self._expected[sender]), None)) is not None:
            self._expected[sender] += 1
            key, total, begin = _OF_MESSAGE.unpack_from(ready)
            message = self._partial[sender]
            if not begin or message is None:
                message = bytearray()
            message.extend(memoryview(ready)[_OF_MESSAGE.size :])
            over = len(message) == total
            self._partial[sender] = None if over else message
            if over:
                self._deliver(sender, key, message)
        # Last: who has sent it may leave then, and what it has sent is to be here before it is missed.
        with contextlib.suppress(GaspiError):  # of one that is gone
            credit = self._windows + self._context.rank * SLOTS + slot
            self._context.post("notify", sender, self._queue, (self._segment, sender, credit, 1))

    def _deliver(self, sender: int, key: int, message: bytearray) -> None:
        if key == ABORTS:
            self.on_message(sender, bytes(message))
            return
        if self._has_ended(key):
            return
        with self._changed:
            self._inboxes[sender, key].append(message)
            self._changed.notify_all()

    def _has_ended(self, key: int) -> bool:
        """Whether a message is for a group that has ended here."""
        nearest = self._ended[bisect.bisect(self._ended, key) - 1 :][:1]  # below the lowest: the highest
        return any((key - first) % 2**64 < KEYS_OF_GROUP for first in nearest)


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _left(deadline: float | None) -> float:
    """Seconds until a waiting thread looks around, or until the time is over."""
    return SLICE / 1000 if deadline is None else min(SLICE / 1000, deadline - time.monotonic())
