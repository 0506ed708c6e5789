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


class Letters:
    """Those that a group's member sends to the others and expects of them.

    Args:
        mail: Of this process.
        ranks: By member, its rank.
        index: This one's number among the members.
        key: The group's.
        check: Called now and then while a thread waits; it raises why that is in vain.
        ping: Whether a rank is there.
        buffers: What holds them; it stays as long as something is to be sent.
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
        # By member and tag, in the order in which they were requested; only who waits for one holds it.
        self._expected: dict[tuple[int, int], deque[weakref.ref[ReceivedLetter]]] = {}
        self._lock = threading.RLock()
        self._next_sender = 0  # whose turn it is
        # A thread holds letters by what is queued alone, so that it ends with them.
        self._posts: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._postman: threading.Thread | None = None

    def close(self) -> None:
        """Send what is queued, and no more."""
        self._posts.put(None)

    def send(self, member: int, at: int, size: int, tag: int, form: int) -> "SentLetter":
        """Begin to send a message to a member."""
        letter = SentLetter()
        content = memory(at, size)

        def post() -> None:
            try:
                self._mail.post(self._ranks[member], self._key_of(tag), [content, _FORM.pack(form)])
            except GaspiError as error:
                letter.error = error
            finally:
                self._mail.has_posted()
                letter.over.set()

        self._mail.will_post()
        with self._lock:
            if self._postman is None:
                self._postman = threading.Thread(
                    target=_deliver, args=(self._posts,), name="carme-gpi2-post", daemon=True
                )
                self._postman.start()
        self._posts.put(post)
        return letter

    def receive(self, member: int, at: int, size: int, tag: int, form: int) -> "ReceivedLetter":
        """Begin to receive a message of a member."""
        letter = ReceivedLetter(self, member, tag, memory(at, size), form)
        with self._lock:
            letters = self._expected.setdefault((member, tag), deque())
            while letters and letters[0]() is None:
                letters.popleft()
            letters.append(weakref.ref(letter))
        return letter

    def sender(self, tag: int, timeout: int) -> int:
        """A member whose message is there, and that no receive expects; -1: none until `timeout`."""
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
        """A member's rank."""
        return self._ranks[member]

    def wait(self, letter: "ReceivedLetter", deadline: float | None) -> bool:
        """Wait until a letter has its message; whether it has."""
        rank, key = self._ranks[letter.member], self._key_of(letter.tag)
        while True:
            self._distribute(letter.member, letter.tag)
            if letter.has_come():
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._mail.wait_for(rank, key, deadline, letter.has_come, self._check)

    def _distribute(self, member: int, tag: int) -> None:
        """Give letters what has come, in their order. Letters that nobody has any more get nothing."""
        has_arrived = False
        with self._lock:
            letters = self._expected.get((member, tag), ())
            while letters:
                if (letter := letters[0]()) is not None:
                    message = self._mail.poll(self._ranks[member], self._key_of(tag))
                    if message is None:
                        break
                    letter.message = message
                    has_arrived = True
                letters.popleft()
        if has_arrived:
            self._mail.wake()  # other threads may wait for them

    def _is_unexpected(self, member: int, tag: int) -> bool:
        with self._lock:
            expected = sum(letter() is not None for letter in self._expected.get((member, tag), ()))
            return self._mail.waiting(self._ranks[member], self._key_of(tag)) > expected

    def _key_of(self, tag: int) -> int:
        return (self._key + ((tag << 1) | 1) % KEYS_OF_GROUP) % 2**64


class SentLetter:
    """A message to a member."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: GaspiError | None = None

    def wait(self, timeout: int) -> bool:
        """Wait at most `timeout` milliseconds; whether it is over."""
        over = self.over.wait(None if timeout < 0 else timeout / 1000)
        if over and self.error:
            raise self.error
        return over

    def done(self) -> bool:
        """Whether it is over."""
        return self.over.is_set()


class ReceivedLetter:
    """A message of a member.

    Its buffer is written by who waits for it or asks for it, and so has the buffer: nothing is written for a
    letter that nobody has any more.
    """

    def __init__(self, letters: Letters, member: int, tag: int, into: memoryview, form: int) -> None:
        self._letters, self.member, self.tag = letters, member, tag
        self._into, self._form = into, _FORM.pack(form)
        self._lock = threading.Lock()
        self.message: bytearray | None = None  # what has come
        self.group: object = None  # which this holds: messages of a group that has ended are dropped
        self._is_read = False
        self._error: GaspiError | None = None

    def has_come(self) -> bool:
        """Whether its message is there."""
        return self.message is not None

    def wait(self, timeout: int) -> bool:
        """Wait at most `timeout` milliseconds; whether it is over."""
        deadline = None if timeout < 0 else time.monotonic() + timeout / 1000
        if not self.has_come() and not self._letters.wait(self, deadline):
            return False
        self._read()
        if self._error:
            raise self._error
        return True

    def done(self) -> bool:
        """Whether it is over."""
        if not self.has_come() and not self._letters.wait(self, time.monotonic()):
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
                rank = self._letters.rank_of(self.member)
                self._error = Mismatch(
                    f"Rank {rank} sent a message of another size or type.",
                    "Send and receive the same number of elements of the same type.",
                )
            self.message = bytearray()


def memory(at: int, size: int) -> memoryview:
    """The bytes at an address."""
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * size).from_address(at)).cast("B")


def _deliver(posts: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (post := posts.get()) is not None:
        post()
        del post
