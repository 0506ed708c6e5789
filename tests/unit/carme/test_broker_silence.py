"""A broker that accepts connections and answers nothing holds up its clients once, and not for long."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hanging_broker import HangingBroker

from carme.broker import BrokerClient, client, protocol
from carme.broker.client import open_files
from carme.broker.service import PROGRAMS_PATIENCE
from carme.broker.silence import Silence
from carme.errors import BrokerTimeout, BrokerUnavailable
from carme.jobs import JobRequest
from carme.slurm import programs
from patience import HANG


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[HangingBroker]:
    running = HangingBroker(tmp_path / "s")
    yield running
    running.close()


def test_after_one_call_that_waited_all_others_fail_at_once(broker: HangingBroker) -> None:
    silence = Silence(patience=0.01, check_seconds=0.01, rest=HANG)
    clients = [BrokerClient(broker.path, HANG, None, silence) for _ in range(2)]
    with pytest.raises(BrokerTimeout, match=r"does not answer: it took too long.*carme-broker"):
        clients[0].jobs()
    for ask in (clients[1].jobs, lambda: open_files(clients[0], "ada")):
        with pytest.raises(BrokerUnavailable, match="it took too long") as refused:
            ask()
        assert not isinstance(refused.value, BrokerTimeout), "nothing was sent that it may still do"
    request, check = broker.received()
    assert request and not check


def test_files_of_a_broker_that_hangs_are_given_up_too(broker: HangingBroker) -> None:
    silence = Silence(patience=0.01, check_seconds=0.01, rest=HANG)
    with pytest.raises(BrokerTimeout):
        open_files(BrokerClient(broker.path, HANG, None, silence), "ada")


def test_a_broker_that_is_slow_but_there_is_waited_for(broker: HangingBroker) -> None:
    serving = broker.answer(2, slow=True)
    silence = Silence(patience=0.01, check_seconds=HANG, rest=HANG)
    assert BrokerClient(broker.path, HANG, None, silence).jobs() == []
    serving.join()


def test_a_broker_that_is_back_answers_again(broker: HangingBroker) -> None:
    silence = Silence(patience=0.01, check_seconds=0.01, rest=0.0)
    client = BrokerClient(broker.path, HANG, None, silence)
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            client.jobs()
    assert [bool(data) for data in broker.received()] == [True, False, False], "only the first one was sent"
    silence.patience = silence.check_seconds = HANG
    serving = broker.answer(3)
    assert client.jobs() == [] and client.jobs() == []
    serving.join()


def test_requests_do_not_rest_while_there_is_no_broker(tmp_path: Path) -> None:
    broker = HangingBroker(tmp_path / "s")
    silence = Silence(patience=0.01, check_seconds=0.01, rest=0.0)
    client = BrokerClient(broker.path, HANG, None, silence)
    with pytest.raises(BrokerTimeout):
        client.jobs()
    silence.rest = HANG
    broker.close()
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match="no such file"):
            client.jobs()
    assert silence._silent_until is None


def test_no_client_gives_up_a_submission_that_the_broker_still_makes() -> None:
    request = JobRequest(name="train", kind="batch", command=["train"], partition="gpu", nodes=1, minutes=5)
    submissions = [protocol.Submit(request), protocol.Resubmit(7)]
    # For what a script or a stage-in job needs, too.
    longest = 3 * PROGRAMS_PATIENCE + programs.TIMEOUT
    assert all(client._timeout_of(each, 10.0) > longest for each in submissions)
    assert client._timeout_of(protocol.GetEvents(wait=5.0), 10.0) == 15.0
