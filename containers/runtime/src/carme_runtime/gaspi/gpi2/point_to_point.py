"""Messages between two members of a group of GPI-2."""

import ctypes
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from carme_runtime.collectives.errors import GaspiError, Mismatch, PeerLost
from carme_runtime.gaspi.gpi2.mail import KEYS_OF_GROUP, Mail

_FORM = struct.Struct("<I")
_BETWEEN_PINGS = 1.0  # seconds, while a member waits for a message of any other


class PointToPoint:
    """Sends and receives of a member of a group.

    Args:
        mail: The mail of this process.
        ranks: The rank of each member.
        index: The index of this member.
        key: The key of the group.
        check: Called from time to time while a thread waits. It raises an error if the wait is in vain.
        ping: Whether a rank is alive.
        buffers: The owner of the sent memory. It is referenced while sends are pending.
    """

    def __init__(
        self,
        mail: Mail,
        ranks: Sequence[int],
        index: int,
        key: int,
        check: Callable[[], None],
        ping: Callable[[int], bool],
        buffers: Any,
    ) -> None:
        self._mail, self._ranks, self._index, self._key = mail, ranks, index, key
        self._check, self._ping, self._buffers = check, ping, buffers
        self._peers = [member for member in range(len(ranks)) if member != index]
        # By member and tag, in the order of the calls. Only callers hold strong references.
        self._expected: dict[tuple[int, int], deque[weakref.ref[ReceiveRequest]]] = {}
        self._lock = threading.RLock()
        self._next_sender = 0  # the member to probe first
        # The thread only references queued sends, so that it ends with them.
        self._posts: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._sender_thread: threading.Thread | None = None

    def close(self) -> None:
        """Send all queued messages, then stop."""
        self._posts.put(None)

    def send(self, member: int, at: int, size: int, tag: int, form: int) -> "SendRequest":
        """Start a send to a member."""
        request = SendRequest()
        content = memory(at, size)

        def post() -> None:
            try:
                self._mail.post(self._ranks[member], self._key_of(tag), [content, _FORM.pack(form)])
            except GaspiError as error:
                request.error = error
            finally:
                self._mail.has_posted()
                request.over.set()

        self._mail.will_post()
        with self._lock:
            if self._sender_thread is None:
                self._sender_thread = threading.Thread(
                    target=_deliver, args=(self._posts,), name="carme-gpi2-post", daemon=True
                )
                self._sender_thread.start()
        self._posts.put(post)
        return request

    def receive(self, member: int, at: int, size: int, tag: int, form: int) -> "ReceiveRequest":
        """Start a receive from a member."""
        request = ReceiveRequest(self, member, tag, memory(at, size), form)
        with self._lock:
            requests = self._expected.setdefault((member, tag), deque())
            while requests and requests[0]() is None:
                requests.popleft()
            requests.append(weakref.ref(request))
        return request

    def sender(self, tag: int, timeout: int) -> int:
        """Return a member whose message has arrived without a receive; -1 after `timeout` ms."""
        end = time.monotonic() + timeout / 1000
        pinged_at = time.monotonic()
        while True:
            self._check()
            for member in sorted(self._peers, key=lambda m: (m < self._next_sender, m)):
                if self._is_unexpected(member, tag):
                    self._next_sender = member + 1
                    return member
            if timeout >= 0 and time.monotonic() >= end:
                return -1
            if time.monotonic() - pinged_at > _BETWEEN_PINGS:
                pinged_at = time.monotonic()
                if not any(self._ping(self._ranks[member]) for member in self._peers):
                    raise PeerLost(
                        "All other members were lost before one of them sent a message.",
                        "Form a new group without them, or start the run again.",
                    )
            time.sleep(0.001)

    def rank_of(self, member: int) -> int:
        """Return the rank of a member."""
        return self._ranks[member]

    def wait(self, request: "ReceiveRequest", deadline: float | None) -> bool:
        """Wait until a receive has its message. Return False at the deadline."""
        rank, key = self._ranks[request.member], self._key_of(request.tag)
        while True:
            self._distribute(request.member, request.tag)
            if request.has_arrived():
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._mail.wait_for(rank, key, deadline, request.has_arrived, self._check)

    def _distribute(self, member: int, tag: int) -> None:
        """Assign arrived messages to receives, in order. Skip receives that no caller holds."""
        has_arrived = False
        with self._lock:
            requests = self._expected.get((member, tag), ())
            while requests:
                if (request := requests[0]()) is not None:
                    message = self._mail.poll(self._ranks[member], self._key_of(tag))
                    if message is None:
                        break
                    request.message = message
                    has_arrived = True
                requests.popleft()
        if has_arrived:
            self._mail.wake()  # other threads may wait for them

    def _is_unexpected(self, member: int, tag: int) -> bool:
        with self._lock:
            expected = sum(request() is not None for request in self._expected.get((member, tag), ()))
            return self._mail.waiting(self._ranks[member], self._key_of(tag)) > expected

    def _key_of(self, tag: int) -> int:
        return (self._key + ((tag << 1) | 1) % KEYS_OF_GROUP) % 2**64


class SendRequest:
    """A pending send."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: GaspiError | None = None

    def wait(self, timeout: int) -> bool:
        """Wait at most `timeout` milliseconds. Return whether it is over."""
        over = self.over.wait(None if timeout < 0 else timeout / 1000)
        if over and self.error:
            raise self.error
        return over

    def done(self) -> bool:
        """Whether it is over."""
        return self.over.is_set()


class ReceiveRequest:
    """A pending receive.

    The thread that waits or polls writes the buffer. A receive that no caller holds writes nothing.
    """

    def __init__(
        self, point_to_point: PointToPoint, member: int, tag: int, into: memoryview, form: int
    ) -> None:
        self._point_to_point, self.member, self.tag = point_to_point, member, tag
        self._into, self._form = into, _FORM.pack(form)
        self._lock = threading.Lock()
        self.message: bytearray | None = None  # the arrived message
        self.group: object = None  # keeps the group alive: an ended group drops its messages
        self._is_read = False
        self._error: GaspiError | None = None

    def has_arrived(self) -> bool:
        """Whether the message has arrived."""
        return self.message is not None

    def wait(self, timeout: int) -> bool:
        """Wait at most `timeout` milliseconds. Return whether it is over."""
        deadline = None if timeout < 0 else time.monotonic() + timeout / 1000
        if not self.has_arrived() and not self._point_to_point.wait(self, deadline):
            return False
        self._read()
        if self._error:
            raise self._error
        return True

    def done(self) -> bool:
        """Whether it is over."""
        if not self.has_arrived() and not self._point_to_point.wait(self, time.monotonic()):
            return False
        self._read()
        return True

    def _read(self) -> None:
        with self._lock:
            if self._is_read or self.message is None:
                return
            self._is_read = True
            content, form = memoryview(self.message)[: -_FORM.size], self.message[-_FORM.size :]
            if len(content) == len(self._into) and form == self._form:
                self._into[:] = content
            else:
                rank = self._point_to_point.rank_of(self.member)
                self._error = Mismatch(
                    f"Rank {rank} sent a message of another size or type.",
                    "Send and receive the same number of elements of the same type.",
                )
            self.message = bytearray()


def memory(at: int, size: int) -> memoryview:
    """Return the bytes at an address as a view."""
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * size).from_address(at)).cast("B")


def _deliver(posts: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (post := posts.get()) is not None:
        post()
        del post
