"""A collective that waits for long: it is said which ranks are where."""

import re
import signal
import time

import pytest


def limit(seconds):
    return lambda rank: {"CARME_HANG_SECONDS": str(seconds)}


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1]], ids=["one node", "two nodes"])
def test_the_stacks_of_all_ranks_are_printed_once(launcher, nodes):
    ranks = launcher.start("hanging", nodes, "busy", environment=limit(1))
    assert ranks.finish() == [0, 0, 0], ranks.said()
    said = ranks.said()
    assert said.count("A collective has waited for 1 s. Where the ranks are:") == 1, said
    assert re.search(r"Rank 1 runs:\n(.*\n)*?.*in busy_elsewhere", said), said
    assert re.search(r"Each of ranks 0, 2 waits:\n(.*\n)*?.*in wait_for_the_others", said), said


def test_a_stopped_rank_is_named(launcher):
    ranks = launcher.start("hanging", [0, 0], "stopped", environment=limit(1))
    said = ""
    end = time.monotonic() + 60
    while "did not answer" not in said and time.monotonic() < end:
        line = ranks.processes[0].stdout.readline()
        assert line, said
        said += line
    assert "Rank 1 did not answer" in said and "in wait_for_the_others" in said, said
    ranks.processes[1].send_signal(signal.SIGCONT)
    assert ranks.finish() == [0, 0], ranks.said()


@pytest.mark.parametrize(("how", "seconds"), [("never", 1), ("busy", 0), ("busy", 100)])
def test_nothing_is_said_of_waits_that_end(launcher, how, seconds):
    ranks = launcher.start("hanging", [0, 0], how, environment=limit(seconds))
    assert ranks.finish() == [0, 0], ranks.said()
    assert "waited" not in ranks.said()


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(launcher, text):
    ranks = launcher.start("hanging", [0], "busy", environment=limit(text))
    assert ranks.finish() == [1]
    assert f"CARME_HANG_SECONDS is '{text}'" in ranks.outputs[0]
