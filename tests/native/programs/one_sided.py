"""The contract of one-sided operations. Every rank works with the next one, whatever lies between them."""

import time

import numpy as np

from carme_runtime import gaspi

with gaspi.init(30) as process:
    rank, size = process.rank, process.size
    right, left = (rank + 1) % size, (rank - 1) % size
    segment = process.segment_create(3, 1 << 20)
    words = segment.array("uint64")
    assert segment.size == 1 << 20 and not words[:1000].any()
    assert process.segment_size(3, right) == 1 << 20 and process.segment_size(4, right) == 0

    # A write and its notification: a rank that sees the one sees the other.
    words[:1000] = np.arange(1000) + rank * 1000
    process.write_notify(3, 0, right, 3, 8000, 8000, notification=7, value=rank + 1)
    assert process.notify_waitsome(3, first=5, count=4) == 7
    assert (words[1000:2000] == np.arange(1000) + left * 1000).all()
    assert process.notify_reset(3, 7) == left + 1
    assert process.notify_reset(3, 7) == 0
    process.wait()
    process.barrier()

    # Lists, and a notification on its own.
    parts = [(3, 8 * i, 3, 32000 + 16 * i, 8) for i in range(100)]
    process.write_list_notify(right, parts, 3, 9, queue=2)
    process.wait(queue=2)
    process.notify_waitsome(3, 9)
    assert (words[4000:4200:2] == np.arange(100) + left * 1000).all()
    process.read_list(right, [(3, 64000, 3, 0, 800), (3, 64800, 3, 800, 800)], queue=1)
    process.wait(queue=1)
    assert (words[8000:8200] == np.arange(200) + right * 1000).all()
    process.notify(left, 3, 11, value=5)
    assert process.notify_waitsome(3, 11) == 11 and process.notify_reset(3, 11) == 5

    # Reading with a notification, which is one's own.
    words[8000:8600] = 0
    process.read_notify(3, 64000, right, 3, 0, 800, notification=13, queue=1)
    assert process.notify_waitsome(3, 13) == 13 and process.notify_reset(3, 13) == 1
    assert (words[8000:8100] == np.arange(100) + right * 1000).all() and not words[8100:8200].any()
    parts = [(3, 64800 + 8 * i, 3, 800 + 8 * i, 8) for i in range(300)]
    process.read_list_notify(right, parts, 3, 14, queue=4)
    assert process.notify_waitsome(3, 14) == 14 and process.notify_reset(3, 14) == 1
    assert (words[8100:8400] == np.arange(100, 400) + right * 1000).all()
    process.read_list_notify(right, [], 3, 15)
    assert process.notify_waitsome(3, 15) == 15 and process.notify_reset(3, 15) == 1
    process.wait(queue=1)
    process.wait(queue=4)

    # After the wait what was written is there, as a barrier then shows the other rank.
    process.barrier()
    for turn in range(20):
        words[32768:65536] = np.arange(32768) + turn + rank
        process.write(3, 32768 * 8, right, 3, 65536 * 8, 32768 * 8, queue=5)
        process.wait(queue=5)
        process.barrier()
        assert (words[65536:98304] == np.arange(32768) + turn + left).all(), turn
        process.barrier()

    # The same without notifications of their own: one that follows on the queue says when they are there.
    process.barrier()
    words[:3] = rank + 1
    process.write(3, 0, right, 3, 72000, 8, queue=3)
    process.write_list(right, [(3, 8, 3, 72008, 8), (3, 16, 3, 72016, 8)], queue=3)
    process.notify(right, 3, 12, queue=3)
    process.wait(queue=3)
    assert process.notify_waitsome(3, 12) == 12 and process.notify_reset(3, 12) == 1
    assert (words[9000:9003] == left + 1).all()
    process.barrier()
    process.read(3, 72800, right, 3, 72000, 16, queue=6)
    process.wait(queue=6)
    assert (words[9100:9102] == rank + 1).all()

    # A segment that only the right one knows, and that is given up again.
    own = process.segment_alloc(6, 4096)
    own.array("uint64")[0] = rank + 50
    if right != rank:
        process.segment_register(6, right)
    process.barrier()
    assert process.segment_size(6, left) == 4096
    process.read(3, 80000, left, 6, 0, 8)
    process.wait()
    assert words[10000] == left + 50
    process.barrier()
    process.segment_delete(6)
    for gone in (lambda: process.segment_delete(6), lambda: process.write(6, 0, right, 3, 0, 8)):
        try:
            gone()
        except gaspi.InvalidCall:
            continue
        raise AssertionError("a segment that was given up can be used")
    assert process.segment_alloc(6, 64).size == 64

    # A large one: more than sockets take at once.
    process.barrier()
    words[16384:65536] = np.arange(49152) * (rank + 1)
    process.barrier()
    process.read(3, 65536 * 8, right, 3, 16384 * 8, 49152 * 8)
    process.wait()
    assert (words[65536:114688] == np.arange(49152) * (right + 1)).all()
    process.barrier()

    # Atomics from all sides.
    words[-1] = 0
    process.barrier()
    before = [process.fetch_add(0, 3, (1 << 20) - 8, 3) for _ in range(50)]
    assert sorted(before) == before and all(value % 3 == 0 for value in before)
    process.barrier()
    if rank == 0:
        assert words[-1] == 150 * size
    winners = process.compare_swap(0, 3, (1 << 20) - 16, 0, rank + 1)
    flags = np.zeros(size, np.int32)
    flags[rank] = winners == 0
    process.allreduce(flags)
    assert flags.sum() == 1

    # Passive messages.
    if rank:
        process.passive_send(0, bytes([rank]) * (100_000 + rank))
    else:
        got = dict(process.passive_receive() for _ in range(size - 1))
        assert got == {r: bytes([r]) * (100_000 + r) for r in range(1, size)}

    # Time-outs end, and the call can be made again.
    process.barrier()  # a message that is still on its way would be one that came
    for call in (
        lambda: process.notify_waitsome(3, 100, 10, timeout=50),
        lambda: process.notify_waitsome(3, 100, 10, timeout=gaspi.TEST),
        lambda: process.passive_receive(timeout=gaspi.TEST),
        lambda: process.passive_receive(timeout=30),
    ):
        try:
            call()
        except gaspi.Timeout:
            pass
        else:
            raise AssertionError("nothing was to come")

    def come(call, timeout, first):
        """Rank 0 comes to what the others do as soon as all of them have waited for it in vain once."""
        if rank == 0:
            for peer in range(1, size):
                process.notify_waitsome(3, first + peer, timeout=60_000)
                process.notify_reset(3, first + peer)
        tries = 0
        while True:
            try:
                return call(timeout=timeout)
            except gaspi.Timeout:
                tries += 1
            if tries == 1 and rank:
                process.notify(0, 3, first + rank)
                process.wait()
            time.sleep(0.001)

    come(process.barrier, 20, 200)
    process.wait(timeout=gaspi.TEST)  # nothing is under way
    late = np.array([rank], np.int64)
    come(lambda timeout: process.allreduce(late, timeout=timeout), gaspi.TEST, 300)
    assert late[0] == size * (size - 1) // 2
    assert process.fetch_add(right, 3, (1 << 20) - 24, 0, timeout=20_000) == 0
    assert process.compare_swap(right, 3, (1 << 20) - 24, 5, 6, timeout=20_000) == 0
    assert process.state_vector() == [gaspi.State.HEALTHY] * size and process.ping(right)

    # Mistakes are refused before anything happens.
    for call in (
        lambda: process.write(3, 0, right, 3, (1 << 20) - 4, 8),
        lambda: process.write(3, 0, size, 3, 0, 8),
        lambda: process.write(4, 0, right, 3, 0, 8),
        lambda: process.read(3, 0, right, 200, 0, 8),
        lambda: process.write(3, 0, right, 3, 2**64 - 4, 8),
        lambda: process.notify(right, 3, 70_000),
        lambda: process.notify(right, 3, 1, value=0),
        lambda: process.read_notify(3, 0, right, 3, 8, 8, notification=70_000),
        lambda: process.read_list_notify(right, [(3, 0, 3, 8, 8)], 200, 1),
        lambda: process.wait(queue=99),
        lambda: process.fetch_add(right, 3, 4, 1),
        lambda: process.segment_create(3, 8),
        lambda: process.segment_create(300, 8),
        lambda: process.segment_alloc(5, 0),
        lambda: process.passive_send(right, b"x" * (2**20 + 1)),
        lambda: process.group([0, 0]),
        lambda: segment.array("float64", offset=4),
    ):
        try:
            call()
        except gaspi.InvalidCall as error:
            assert error.message.endswith(".") and error.remedy.endswith("."), error
        else:
            raise AssertionError("a mistake was not refused")
    view = segment.array()
    process.barrier()
    process.segment_delete(3)
    assert view.size == 1 << 20 and view[0] == view[0]
    assert process.state_vector() == [gaspi.State.HEALTHY] * size and process.ping(right)
