"""A call that waits for long: a report says which ranks are where."""

import re
import signal
import time

import pytest

from patience import HANG


def limit(seconds):
    return lambda rank: {"CARME_HANG_SECONDS": str(seconds)}


def run_until_reported(launcher, tmp_path, nodes, face, seconds):
    """What all ranks print, where rank 1 does something else until that has been reported."""
    over = tmp_path / "reported"
    ranks = launcher.start("hanging", nodes, "busy", face, str(over), environment=limit(seconds))
    assert ranks.finish_after("Where the ranks are:", over.touch, 3 * HANG) == [0] * len(nodes), (
        ranks.output()
    )
    return ranks.output()


pytestmark = pytest.mark.timeout(7 * HANG)


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
def test_the_stacks_of_all_ranks_are_printed_once(launcher, tmp_path, nodes, face, what):
    message = run_until_reported(launcher, tmp_path, nodes, face, 4)
    assert message.count(f"{what} has waited for 4 s. Where the ranks are:") == 1, message
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
def test_training_with_keras_on_tensorflow_is_seen(launcher, tmp_path, face, late, waiting):
    launcher.variables["KERAS_BACKEND"] = "tensorflow"
    message = run_until_reported(launcher, tmp_path, [0, 1], face, 15)  # TensorFlow makes its graphs first
    assert "A collective has waited for 15 s. Where the ranks are:" in message, message
    assert re.search(rf"Rank 1 runs:\n(.*\n)*?.*in {late}", message), message
    assert re.search(waiting, message), message


def test_stage_and_micro_batch_of_a_pipeline_are_named(launcher, tmp_path):
    message = run_until_reported(launcher, tmp_path, [0, 0], "pipeline", 4)
    assert "A stage of a pipeline has waited for 4 s. Where the ranks are:" in message, message
    assert "Rank 0 waits in stage 0, backward pass of micro-batch 1:" in message, message
    assert "Rank 1 runs in stage 1, backward pass of micro-batch 1:" in message, message


def test_training_with_keras_on_torch_is_seen(launcher, tmp_path):
    launcher.variables["KERAS_BACKEND"] = "torch"
    message = run_until_reported(launcher, tmp_path, [0, 0], "keras", 15)
    assert "A collective has waited for 15 s. Where the ranks are:" in message, message
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
    end = time.monotonic() + HANG
    while "did not answer" not in message and time.monotonic() < end:
        line = ranks.processes[0].stdout.readline()
        assert line, message
        message += line
    assert "Rank 1 did not answer" in message and "in wait_for_the_others" in message, message
    if face == "wait":
        assert "A call of wait has waited for 1 s." in message, message
    ranks.processes[1].send_signal(signal.SIGCONT)
    assert ranks.finish() == [0, 0], ranks.output()


@pytest.mark.parametrize("face", ["torch", "barrier"])
@pytest.mark.parametrize(("how", "seconds"), [("never", 4), ("busy", 0), ("busy", HANG)])
def test_nothing_is_reported_of_waits_that_end(launcher, how, seconds, face):
    ranks = launcher.start("hanging", [0, 0], how, face, environment=limit(seconds))
    assert ranks.finish() == [0, 0], ranks.output()
    assert "waited" not in ranks.output()


@pytest.mark.parametrize("face", ["torch", "barrier"])
@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(launcher, text, face):
    ranks = launcher.start("hanging", [0], "busy", face, environment=limit(text))
    assert ranks.finish() == [1]
    assert f"CARME_HANG_SECONDS is '{text}'" in ranks.outputs[0]
