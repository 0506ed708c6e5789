"""A call that waits for long: it is said which ranks are where."""

import re
import signal
import time

import pytest


def limit(seconds):
    return lambda rank: {"CARME_HANG_SECONDS": str(seconds)}


@pytest.mark.parametrize(
    ("face", "nodes", "what"),
    [
        ("torch", [0, 0, 0], "A collective"),
        ("torch", [0, 0, 1], "A collective"),
        ("parallelize", [0, 0, 0], "A collective"),
        ("parallelize", [0, 0, 1], "A collective"),
        ("horovod", [0, 0, 1], "A collective"),
        ("barrier", [0, 0, 0], "A collective"),
        ("allreduce", [0, 0, 1], "A collective"),
        ("notify_waitsome", [0, 0, 0], "A call of notify_waitsome"),
        ("passive_receive", [0, 1, 2], "A call of passive_receive"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else value,
)
def test_the_stacks_of_all_ranks_are_printed_once(launcher, nodes, face, what):
    ranks = launcher.start("hanging", nodes, "busy", face, environment=limit(1))
    assert ranks.finish() == [0, 0, 0], ranks.said()
    message = ranks.said()
    assert message.count(f"{what} has waited for 1 s. Where the ranks are:") == 1, message
    assert message.count("has waited") == 1, message
    assert re.search(r"Rank 1 runs:\n(.*\n)*?.*in busy_elsewhere", message), message
    assert re.search(r"Each of ranks 0, 2 waits:\n(.*\n)*?.*in wait_for_the_others", message), message
    assert "did not answer" not in message, message


@pytest.mark.parametrize(
    ("face", "late", "waiting"),
    [
        # The others wait before their next step,
        ("keras", "busy_elsewhere", r"Rank 0 waits:\n(.*\n)*?.*in wait_for_the_others"),
        # or within one: there TensorFlow's own threads do, while the main thread waits for these.
        (
            "keras-graph",
            "wait_for_the_others",
            r"Rank 0 runs:\n(.*\n)*?.*in wait_for_the_others(.*\n)*?"
            r"waits, in a further thread:\n(.*\n)*?.*in add",
        ),
    ],
)
def test_training_with_keras_on_tensorflow_is_seen(launcher, face, late, waiting):
    launcher.variables["KERAS_BACKEND"] = "tensorflow"
    ranks = launcher.start("hanging", [0, 1], "busy", face, environment=limit(4))
    assert ranks.finish() == [0, 0], ranks.said()
    message = ranks.said()
    assert "A collective has waited for 4 s. Where the ranks are:" in message, message
    assert re.search(rf"Rank 1 runs:\n(.*\n)*?.*in {late}", message), message
    assert re.search(waiting, message), message


@pytest.mark.timeout(500)
def test_stage_and_micro_batch_of_a_pipeline_are_named(launcher):
    ranks = launcher.start("hanging", [0, 0], "busy", "pipeline", environment=limit(1))
    assert ranks.finish(450) == [0, 0], ranks.said()
    message = ranks.said()
    assert "A stage of a pipeline has waited for 1 s. Where the ranks are:" in message, message
    assert "Rank 0 waits in stage 0, backward pass of micro-batch 1:" in message, message
    assert "Rank 1 runs in stage 1, backward pass of micro-batch 1:" in message, message


def test_training_with_keras_on_torch_is_seen(launcher):
    launcher.variables["KERAS_BACKEND"] = "torch"
    ranks = launcher.start("hanging", [0, 0], "busy", "keras", environment=limit(4))
    assert ranks.finish() == [0, 0], ranks.said()
    message = ranks.said()
    assert "A collective has waited for 4 s. Where the ranks are:" in message, message
    assert re.search(r"Rank 1 runs:\n(.*\n)*?.*in busy_elsewhere", message), message
    assert re.search(r"Rank 0 waits:\n(.*\n)*?.*in wait_for_the_others", message), message


@pytest.mark.parametrize(
    ("nodes", "face"),
    [([0, 0], "torch"), ([0, 0], "parallelize"), ([0, 0], "barrier"), ([0, 1], "barrier"), ([0, 1], "wait")],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_a_stopped_rank_is_named(launcher, nodes, face):
    ranks = launcher.start("hanging", nodes, "stopped", face, environment=limit(1))
    message = ""
    end = time.monotonic() + 60
    while "did not answer" not in message and time.monotonic() < end:
        line = ranks.processes[0].stdout.readline()
        assert line, message
        message += line
    assert "Rank 1 did not answer" in message and "in wait_for_the_others" in message, message
    if face == "wait":
        assert "A call of wait has waited for 1 s." in message, message
    ranks.processes[1].send_signal(signal.SIGCONT)
    assert ranks.finish() == [0, 0], ranks.said()


@pytest.mark.parametrize("face", ["torch", "barrier"])
@pytest.mark.parametrize(("how", "seconds"), [("never", 1), ("busy", 0), ("busy", 100)])
def test_nothing_is_reported_of_waits_that_end(launcher, how, seconds, face):
    ranks = launcher.start("hanging", [0, 0], how, face, environment=limit(seconds))
    assert ranks.finish() == [0, 0], ranks.said()
    assert "waited" not in ranks.said()


@pytest.mark.parametrize("face", ["torch", "barrier"])
@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(launcher, text, face):
    ranks = launcher.start("hanging", [0], "busy", face, environment=limit(text))
    assert ranks.finish() == [1]
    assert f"CARME_HANG_SECONDS is '{text}'" in ranks.outputs[0]
