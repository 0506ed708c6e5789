"""Handshakes with something changed, left out or added on the way: nobody is let in, nobody hangs."""

import contextlib
import random
import socket
import struct
import threading
import time
from typing import Any

import pytest

from carme_runtime.collectives.errors import PeerLost, WrongKey
from carme_runtime.gaspi import handshake, joining, rendezvous
from patience import HANG

KEY = b"k" * 32
RANK, STREAM = 3, 1
FROM_CONNECTING = len(handshake.MAGIC) + 32 + handshake.IDENTITY.size + 32
FROM_ACCEPTING = 32 + 32 + 1
REFUSED_CONNECTING = (WrongKey, PeerLost)
REFUSED_ACCEPTING = (WrongKey, handshake.NotAPeer, OSError)


def shaken(change_out, change_in):
    """What both sides make of a handshake whose bytes pass through `change_out(at, data)` and `change_in`.

    And whether that changed what the one or the other reads.
    """
    connecting, near = socket.socketpair()
    far, accepting = socket.socketpair()
    results: dict[str, Any] = {"spoiled": False}

    def side(name, call, expected):
        try:
            results[name] = call() or "in"
        except expected as error:
            results[name] = type(error)
        except BaseException as error:
            results[name] = error

    deadline = time.monotonic() + HANG

    def pump(source, target, change, read):
        sent, at, delivered = b"", 0, b""
        with contextlib.suppress(OSError):  # one side has refused the other and is gone
            while data := source.recv(4096):
                changed = change(at, data)
                at += len(data)
                sent, delivered = sent + data, delivered + changed
                target.sendall(changed)
                if len(changed) < len(data):
                    break  # the rest will not come either: nobody waits for it
        results["spoiled"] |= sent[:read] != delivered[:read]
        for end, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
            with contextlib.suppress(OSError):
                end.shutdown(how)

    def greet():
        with connecting:
            handshake.greet(connecting, KEY, RANK, STREAM, deadline)

    def admit():
        with accepting:
            return handshake.admit(accepting, KEY, deadline)

    threads = [
        threading.Thread(target=side, args=("connecting", greet, REFUSED_CONNECTING)),
        threading.Thread(target=side, args=("accepting", admit, REFUSED_ACCEPTING)),
        threading.Thread(target=pump, args=(near, far, change_out, FROM_CONNECTING)),
        threading.Thread(target=pump, args=(far, near, change_in, FROM_ACCEPTING - 1)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    near.close()
    far.close()
    return results


def refused(result, kinds):
    return isinstance(result, type) and issubclass(result, kinds) and result is not TimeoutError


def keep(at, data):
    return data


def changed(chance, length):
    """A way of spoiling one of `length` bytes: exchanged, left out, doubled, or the first one missing."""
    place, how, flip = (
        chance.randrange(length),
        chance.choice(["flip", "drop", "double", "end"]),
        1 << chance.randrange(8),
    )

    def change(at, data):
        here = place - at
        if not 0 <= here < len(data):
            return data
        if how == "flip":
            return data[:here] + bytes([data[here] ^ flip]) + data[here + 1 :]
        if how == "drop":
            return data[:here] + data[here + 1 :]
        if how == "double":
            return data[:here] + data[here : here + 1] + data[here:]
        return data[:here]

    return change, (place, how, flip)


def test_an_untouched_one_lets_the_rank_in():
    results = shaken(keep, keep)
    assert results == {"connecting": "in", "accepting": (RANK, STREAM), "spoiled": False}


@pytest.mark.parametrize("seed", [random.randrange(10**6)])
def test_spoiled_ones_are_refused(seed):
    chance = random.Random(seed)
    spoiled = 0
    for number in range(200):
        outward = chance.random() < 0.6
        change, what = changed(chance, FROM_CONNECTING if outward else FROM_ACCEPTING)
        results = shaken(change if outward else keep, keep if outward else change)
        reported = (seed, number, outward, what, results)
        if results["spoiled"]:
            spoiled += 1
            side, kinds = ("accepting", REFUSED_ACCEPTING) if outward else ("connecting", REFUSED_CONNECTING)
            assert refused(results[side], kinds), reported
    assert spoiled > 150


@pytest.mark.parametrize("seed", [random.randrange(10**6)])
def test_noise_is_refused(seed):
    chance = random.Random(seed)
    for _ in range(200):
        stranger, accepting = socket.socketpair()
        with stranger, accepting:
            start = chance.choice([b"", handshake.MAGIC, handshake.MAGIC[:5], handshake.MAGIC + bytes(32)])
            stranger.sendall(start + chance.randbytes(chance.choice([0, 1, 31, 40, 72, 200, 5000])))
            stranger.shutdown(socket.SHUT_WR)
            with pytest.raises(REFUSED_ACCEPTING):
                handshake.admit(accepting, KEY, time.monotonic() + HANG)


def test_what_a_rank_says_of_itself_is_covered_by_the_proof():
    about = len(handshake.MAGIC) + 32

    def change(at, data):
        changed = struct.pack("!II", RANK + 1, STREAM)
        return data if at else data[:about] + changed + data[about + 8 :]

    results = shaken(change, keep)
    assert results["connecting"] is WrongKey and refused(results["accepting"], REFUSED_ACCEPTING)


def test_unauthenticated_peers_of_the_streams_are_reported(caplog):
    """The second door: ranks that know each other already open the streams between them."""
    listener = socket.create_server(("127.0.0.1", 0))
    end = time.monotonic() + HANG

    def knock(greeting):
        with socket.create_connection(listener.getsockname()) as stranger, contextlib.suppress(OSError):
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass

    def come(rank):
        connection = socket.create_connection(listener.getsockname())
        handshake.greet(connection, KEY, rank, 0, end)
        return connection

    results = []
    door = threading.Thread(
        target=lambda: results.append(joining._connect_all(listener, [], 0, {1: 1}, KEY, end))
    )
    door.start()
    knock(b"GET / HTTP/1.0")
    knock(handshake.MAGIC + bytes(40 + 32))
    with come(7) as wrong:
        assert wrong.recv(1) == b""
    with come(1):
        door.join(30)
    assert list(results[0]) == [1]
    socket.socket(fileno=results[0][1][0]).close()
    listener.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"A connection from 127.0.0.1 was refused: it {why}."
        for why in (
            "speaks another protocol",
            "does not hold the key of this job",
            "says it is rank 7, which is not awaited",
        )
    ]


class SlowRank:
    """Carries a rank's connections to `port` as if that rank had no processor for a while.

    The proof of the first one is held back until the accepting side gives up. What is sent after the greeting
    of the next one comes later than a stranger would be waited for.
    """

    def __init__(self, port: int, seconds: float) -> None:
        self._target, self._seconds, self._end = port, seconds, time.monotonic() + HANG
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self.given_up = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> "SlowRank":
        return self

    def __exit__(self, *_: object) -> None:
        self._door.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the test is over
            while True:
                near, _ = self._door.accept()
                threading.Thread(target=self._carry, args=(near, self._reach()), daemon=True).start()

    def _reach(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                assert time.monotonic() < self._end
                time.sleep(0.01)

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, contextlib.suppress(OSError, handshake.NotAPeer):
            far.sendall(handshake.receive(near, FROM_CONNECTING - 32, self._end))
            near.sendall(handshake.receive(far, FROM_ACCEPTING - 1, self._end))
            proof = handshake.receive(near, 32, self._end)
            if not self.given_up:
                self.given_up = 1 if far.recv(1) == b"" else -1
                return
            far.sendall(proof)
            near.sendall(handshake.receive(far, 1, self._end))
            time.sleep(1.5 * self._seconds)
            back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
            back.start()
            self._pump(near, far)
            back.join()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        source.settimeout(None)
        with contextlib.suppress(OSError):
            while message := source.recv(4096):
                target.sendall(message)
            target.shutdown(socket.SHUT_WR)


def in_thread(call, *arguments):
    results = []
    thread = threading.Thread(target=lambda: results.append(call(*arguments)), daemon=True)
    thread.start()

    def result():
        thread.join(60)
        return results[0]

    return result


def test_a_rank_that_gets_no_processor_joins_all_the_same(monkeypatch):
    monkeypatch.setattr(handshake, "ONE_PEER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    message = [{"says": 0}, {"says": 1}]
    with SlowRank(port, 0.5) as slow:
        first = in_thread(rendezvous.exchange, place_of(0, port), KEY, message[0], 60)
        assert rendezvous.exchange(place_of(1, slow.port), KEY, message[1], 60) == message
        assert first() == message and slow.given_up == 1


def test_a_rank_that_gets_no_processor_opens_its_streams_all_the_same(monkeypatch):
    monkeypatch.setattr(handshake, "ONE_PEER_SECONDS", 0.5)
    end = time.monotonic() + HANG
    with socket.create_server(("127.0.0.1", 0)) as listener, SlowRank(listener.getsockname()[1], 0) as slow:
        accepting = in_thread(joining._connect_all, listener, [], 0, {1: 2}, KEY, end)
        where: list[Any] = [{"address": "127.0.0.1", "port": slow.port}]
        streams = joining._connect_all(listener, where, 1, {0: 2}, KEY, end)[0]
        opened = [*streams, *accepting()[1]]
        assert len(opened) == 4 and slow.given_up == 1
        for descriptor in opened:
            socket.socket(fileno=descriptor).close()


def place_of(rank, port):
    return rendezvous.Place(rank, 2, "127.0.0.1", port, None, None)


def test_a_port_scan_does_not_fill_the_log(caplog):
    refusals = handshake.Refusals()
    for _ in range(1000):
        refusals.report("192.0.2.1", TimeoutError())
    assert len(caplog.records) == handshake.Refusals.MOST
    assert "it did not prove in time" in caplog.text
    assert caplog.text.endswith("Further ones are not reported.\n")
