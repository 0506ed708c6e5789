"""Messages and groups of GPI-2 between ranks that are threads of one process, and share its memory."""

import gc
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from carme_runtime.collectives.errors import GaspiError, PeerLost, Timeout
from carme_runtime.collectives.group import Group
from carme_runtime.gaspi.gpi2.group import Gpi2Group, Gpi2Plan
from carme_runtime.gaspi.gpi2.group_registry import GroupRegistry
from carme_runtime.gaspi.gpi2.mail import LARGEST_FRAME, SLOTS, Mail
from patience import HANG

KEY = 77
MUCH = 2 * SLOTS * LARGEST_FRAME  # bytes that find no room with a rank which takes none


class Rank:
    """What messages and groups need of a process that is a rank of GPI-2."""

    group_type, plan_type = Gpi2Group, Gpi2Plan

    def __init__(self, number: int, ranks: "list[Rank]", size: int) -> None:
        self.rank, self.size, self._ranks = number, size, ranks
        self._notes: dict[int, int] = {}
        self._changed = threading.Condition()
        self.runs = True
        self.groups = GroupRegistry()
        self.mail = Mail(self, 0, 0, 1000)
        self.mail.on_message = self.groups.on_message

    def make_segment(self, number: int, size: int) -> mmap.mmap:
        self.memory = mmap.mmap(-1, size)
        return self.memory

    def segment_register_reserved(self, number: int, rank: int, timeout: int) -> None:
        pass

    def wait_for_all(self, timeout: int) -> None:
        pass

    def post(
        self, function: str, rank: int, queue: int, arguments: tuple[Any, ...], entries: int = 1
    ) -> None:
        receiver = self._ranks[rank]
        if function == "write_notify":
            _, at, _, _, there, size, *note = arguments
            receiver.memory[there : there + size] = self.memory[at : at + size]
        else:
            note = arguments[2:]
        with receiver._changed:
            receiver._notes[note[0]] = note[1]
            receiver._changed.notify_all()

    def waitsome(self, segment: int, first: int, count: int, timeout: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._notes and self.runs, timeout / 1000)
            return next(iter(self._notes)) if self._notes and self.runs else -1

    def reset(self, segment: int, number: int) -> int:
        with self._changed:
            return self._notes.pop(number)

    def ping(self, rank: int) -> bool:
        return True

    def throw_if_lost(self, rank: int, doing: str) -> None:
        pass


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    members: list[Rank] = []
    members += [Rank(number, members, 2) for number in range(2)]
    for rank in members:
        rank.mail.start()
    yield members
    for rank in members:
        rank.runs = True
        rank.mail.close()


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def groups(ranks: list[Rank], beside: ThreadPoolExecutor) -> list[Group]:
    """One of both ranks, for each of them."""
    return [found.result(HANG) for found in [beside.submit(Group, rank, [0, 1]) for rank in ranks]]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def sent(rank: Rank) -> None:
    """The other one has taken all that this one has sent."""
    assert rank.mail.drain(time.monotonic() + HANG)


def carried(group: Group, content: bytes) -> None:
    assert group.send(bytearray(content), 1 - group.index).wait(round(HANG * 1000))


def test_nothing_is_written_for_who_no_longer_waits_for_a_message(groups: list[Group]):
    first, second = groups
    dropped, wanted = bytearray(4), bytearray(4)
    request = second.receive(dropped, 0)
    del request
    request = second.receive(wanted, 0)
    carried(first, b"next")
    assert request.wait(round(HANG * 1000))
    assert (dropped, wanted) == (bytes(4), b"next")


def test_each_of_several_threads_gets_its_message(groups: list[Group], beside: ThreadPoolExecutor):
    """Messages of one sender and tag come in their order, whichever thread looks first."""
    first, second = groups
    for turn in range(20):
        buffers = [bytearray(1) for _ in range(3)]
        requests = [second.receive(buffer, 0) for buffer in buffers]
        waiting: list[Future[bool]] = [beside.submit(request.wait) for request in reversed(requests)]
        for number in range(3):
            carried(first, bytes([turn + number]))
            assert waiting[2 - number].result(HANG)
            assert buffers[number] == bytes([turn + number])


def test_a_group_that_nobody_has_any_more_leaves_nothing(ranks: list[Rank], groups: list[Group]):
    threads = {"carme-gpi2-group", "carme-gpi2-post"}
    before = [thread for thread in threading.enumerate() if thread.name in threads]
    assert not before
    for group in groups:
        carried(group, b"unread")
        group.barrier(asynchronous=True)
    for rank in ranks:
        sent(rank)
    assert threads <= {thread.name for thread in threading.enumerate()}
    until(lambda: all(group._group._outstanding == 0 for group in groups))
    ended = [weakref.ref(group._group) for group in groups]
    group = None
    groups.clear()
    until(lambda: not any(thread.name in threads for thread in threading.enumerate()))
    assert [group() for group in ended] == [None, None]
    until(lambda: not any(rank.mail._inboxes for rank in ranks))


class Buffer(bytearray):
    """A bytearray with weak references."""


def test_buffers_outlive_the_group_that_is_at_work_on_them(groups: list[Group]):
    first, second = groups
    buffer = Buffer(8)
    ended = weakref.ref(buffer)
    first.broadcast(buffer, 1, asynchronous=True)
    groups.clear()
    del buffer, first
    gc.collect()
    assert ended() == bytes(8)
    second.broadcast(bytearray(b"12345678"), 1)
    until(lambda: ended() is None)


def test_messages_arrive_though_their_sender_drops_group_and_buffer(ranks: list[Rank], groups: list[Group]):
    first, second = groups
    ranks[1].runs = False
    contents = [bytes([number]) * MUCH for number in range(3)]
    for content in contents:
        first.send(bytearray(content), 1)
    groups.clear()
    del first
    ranks[1].runs = True
    for content in contents:
        buffer = bytearray(MUCH)
        assert second.receive(buffer, 0).wait(round(HANG * 1000))
        assert buffer == content


def test_a_message_arrives_though_its_receiver_drops_the_group(ranks: list[Rank], groups: list[Group]):
    sender, receiver = groups
    buffer = bytearray(4)
    request = receiver.receive(buffer, 0)
    carried(sender, b"here")
    sent(ranks[0])
    ended = weakref.ref(receiver._group)
    groups.clear()
    del receiver
    gc.collect()
    until(lambda: not ranks[1].mail._forgotten)
    assert request.wait(round(HANG * 1000)) and buffer == b"here"
    del request
    until(lambda: ended() is None and not ranks[1].mail._inboxes)


def test_a_message_for_a_group_that_has_ended_leaves_nothing(ranks: list[Rank], groups: list[Group]):
    sender, receiver = groups
    groups.clear()
    del receiver
    gc.collect()
    until(lambda: not ranks[1].mail._inboxes)
    carried(sender, b"late")
    sent(ranks[0])
    assert not ranks[1].mail._inboxes


def test_a_rank_does_not_leave_before_its_messages_do(ranks: list[Rank], groups: list[Group]):
    with ranks[0].mail._sending[1]:  # as if another message was on its way
        groups[0].send(bytearray(b"last"), 1)
        assert not ranks[0].mail.drain(time.monotonic())
    sent(ranks[0])
    buffer = bytearray(4)
    assert groups[1].receive(buffer, 0).done() and buffer == b"last"


def test_a_group_that_another_rank_gave_up_is_not_formed_later(ranks: list[Rank]):
    with pytest.raises(Timeout, match="Rank 1 did not come to the forming of a group"):
        Group(ranks[0], [0, 1], 1)
    sent(ranks[0])
    with pytest.raises(PeerLost, match="Rank 0 gave up: Rank 1 did not come to the forming of a group"):
        Group(ranks[1], [0, 1])


def test_a_call_ends_in_time_where_a_rank_takes_nothing(ranks: list[Rank], groups: list[Group]):
    """And that receiver learns it when it goes on, and messages of other groups come whole."""
    first, second = groups
    ranks[1].runs = False
    with pytest.raises(Timeout, match="Rank 1 did not come to broadcast"):
        first.broadcast(bytearray(MUCH), timeout=10)
    assert not ranks[0].mail.post(1, KEY, [bytes(MUCH)], time.monotonic())
    ranks[1].runs = True
    with pytest.raises(PeerLost, match="Rank 0 gave up: Rank 1 did not come to broadcast"):
        second.broadcast(bytearray(MUCH))
    whole = bytes(range(256)) * (MUCH // 256)
    assert ranks[0].mail.post(1, KEY, [whole], time.monotonic() + HANG)
    assert ranks[1].mail.take(0, KEY, time.monotonic() + HANG) == whole


def test_a_wait_behind_another_message_ends_in_time(ranks: list[Rank], beside: ThreadPoolExecutor):
    ranks[1].runs = False
    first = beside.submit(ranks[0].mail.post, 1, KEY, [bytes(MUCH)])
    until(lambda: not ranks[0].mail._free[1])
    assert not beside.submit(ranks[0].mail.post, 1, KEY, [b"late"], time.monotonic()).result(HANG)
    ranks[1].runs = True
    assert first.result(HANG)
    assert ranks[0].mail.post(1, KEY, [b"last"])
    end = time.monotonic() + HANG
    assert [ranks[1].mail.take(0, KEY, end) for _ in range(2)] == [bytes(MUCH), b"last"]


def test_a_message_that_gpi2_refuses_leaves_no_gap(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: Any, **more: Any) -> None:
        raise GaspiError("gaspi_write_notify failed.", "Try again.")

    with monkeypatch.context() as patch:
        patch.setattr(ranks[0], "post", refuse)
        for _ in range(SLOTS + 1):
            with pytest.raises(GaspiError, match="gaspi_write_notify failed"):
                ranks[0].mail.post(1, KEY, [b"lost"])
    assert ranks[0].mail.post(1, KEY, [b"next"], time.monotonic() + HANG)
    assert ranks[1].mail.take(0, KEY, time.monotonic() + HANG) == b"next"
