"""The `torch.distributed` backend."""

import re
import signal

import pytest

from patience import HANG


def result(ranks):
    found = re.search(r"RESULT (\w+)", ranks.outputs[0])
    assert found, ranks.output()
    return found[1]


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_all_collectives(launcher, nodes):
    launcher.run("torch_collectives", nodes)


@pytest.mark.timeout(4 * HANG)  # ranks are started three times
@pytest.mark.parametrize(
    "how",
    [
        "ddp",
        "no_sync",
        "static_graph",
        "sparse",
        "join",
        "fp16_hook",
        "powersgd_hook",
        "zero",
        "fsdp",
        "fsdp+bf16",
        "fsdp+bf16_sums",
        "fully_shard",
        "fully_shard+bf16",
        "fully_shard+bf16_sums",
    ],
)
def test_unmodified_scripts_train_as_on_gloo(launcher, how):
    launcher.preload = "carme_runtime.torch"
    tested = [result(launcher.run("data_parallel", nodes, "carme", how)) for nodes in ([0, 0], [0, 1])]
    gloo = launcher.start("data_parallel", [0, 0], "gloo", how)
    gloo.finish()  # at whose end PyTorch aborts a rank now and then, when all is done
    expected = result(gloo)
    # Of two summands the order does not matter, so not a bit may differ.
    assert tested == [expected, expected]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1]], ids=["one node", "two nodes"])
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "accumulate",
        "clip",
        "overlap",
        "bf16",
        "uneven",
        "unused",
        "copies",
    ],
)
def test_parallelize_trains_as_one_process_does(launcher, nodes, kind):
    launcher.run("parallel", nodes, kind)


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ([0, 1], "accumulate+unused"),
        ([0, 1], "accumulate+uneven"),
        ([0, 0], "accumulate+overlap+unused"),
        ([0, 1], "clip+uneven"),
        ([0, 1], "wire_bf16+accumulate+clip"),
        ([0, 0], "accumulate+incomplete"),
        ([0, 1], "accumulate+incomplete+uneven+clip"),
        ([0, 0], "accumulate+incomplete+overlap+zeros+unused"),
        ([0, 1], "eval+uneven"),
        ([0, 0], "eval+uneven+sequence"),
        ([0, 0], "failing"),
        ([0, 1], "failing+everywhere+overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_parallelize_takes_several_options_together(launcher, nodes, kind):
    launcher.run("parallel", nodes, kind)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_who_looks_at_a_gradient_that_travels_waits_for_it(launcher, nodes):
    launcher.run("arriving", nodes)


@pytest.mark.parametrize("nodes", [[0], [0, 0]], ids=["one rank", "two ranks"])
def test_optimizers_step_as_without_parallelize(launcher, nodes):
    launcher.run("late_parameters", nodes)


@pytest.mark.parametrize("kind", ["wire_bf16", "wire_int8", "wire_bf16+uneven", "wire_int8+uneven"])
def test_few_bits_on_the_wire_train_nearly_alike(launcher, kind):
    launcher.run("parallel", [0, 1], kind)


@pytest.mark.parametrize("steps", ["all", "half"])
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_what_few_bits_lose_is_added_whatever_the_batches_are(launcher, wire, steps):
    launcher.run("residuals", [0, 1], wire, steps)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_works_say_how_they_ended(launcher, nodes):
    ranks = launcher.run("torch_works", nodes)
    assert [ranks.outputs[rank].count("ENDED") for rank in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("kind", "called"),
    [
        ("broadcast", r"broadcast .*of \d+ x uint8"),
        ("reduce_scatter", r"reduce_scatter .*of \d+ x float32"),
        ("all_gather", r"allgather .*of \d+ x uint8"),
        ("type", r"reduce_scatter .*of \d+ x (float32|int32)"),
    ],
)
def test_ranks_with_other_sizes_get_a_message(launcher, kind, called):
    ranks = launcher.start("torch_mistakes", [0, 0, 0], kind)
    assert ranks.finish() == [0, 0, 0], ranks.output()
    for rank in range(3):
        reported = rf"Mismatch Rank \d called {called}.*, but rank \d called {called}"
        assert re.search(reported, ranks.outputs[rank]), ranks.output()


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_ranks_with_other_types_or_shapes_get_a_message(launcher, nodes):
    ranks = launcher.run("torch_mistakes", nodes, "different")
    message = [re.findall(r"^(\w+\+[ \w]+): (.*)", ranks.outputs[rank], re.MULTILINE) for rank in range(2)]
    assert len(message[0]) == len(message[1]) == 37, ranks.output()
    for texts in zip(*message, strict=True):
        waiting = texts[1:] if texts[0][0].startswith("send") else texts  # who sends need not wait
        assert all("Mismatch Rank" in text for _, text in waiting), texts


@pytest.mark.parametrize("kind", ["broadcast", "reduce_scatter", "all_gather"])
def test_ranks_on_nodes_with_other_sizes_get_a_message_by_their_next_call(launcher, kind):
    ranks = launcher.start("torch_mistakes", [0, 1], kind)
    assert ranks.finish() == [0, 0], ranks.output()
    assert all("Mismatch Rank" in ranks.outputs[rank] for rank in range(2)), ranks.output()


@pytest.mark.parametrize(
    ("nodes", "missing"), [([0, 0, 0], 0), ([0, 0, 1], 1)], ids=["the first of one node", "one of two nodes"]
)
def test_monitored_barrier_names_who_comes_too_late(launcher, tmp_path, nodes, missing):
    (tmp_path / "left").mkdir()
    ranks = launcher.run("monitored_barrier", nodes, str(missing), "late", str(tmp_path / "left"))
    for rank in {0, 1, 2} - {missing}:
        assert f"ERROR Rank {missing} did not come to monitored_barrier within 5 s." in ranks.outputs[rank]


@pytest.mark.parametrize(
    ("nodes", "missing"), [([0, 0, 0], 1), ([0, 1, 1], 0)], ids=["one node", "the first of two nodes"]
)
def test_monitored_barrier_names_who_was_lost(launcher, tmp_path, nodes, missing):
    (tmp_path / "left").mkdir()
    ranks = launcher.start("monitored_barrier", nodes, str(missing), "lost", str(tmp_path / "left"))
    codes = ranks.finish()
    assert codes == [-signal.SIGKILL if rank == missing else 17 for rank in range(3)], ranks.output()
    for rank in {0, 1, 2} - {missing}:
        assert f"ERROR Rank {missing} was lost during monitored_barrier." in ranks.outputs[rank]


@pytest.mark.parametrize("how", ["detach", "forget", "keep"])
def test_models_trained_one_after_the_other_give_their_memory_back(launcher, how):
    launcher.run("many_models", [0, 0], how)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_runs_that_a_process_has_left_take_nothing(launcher, tmp_path, nodes):
    launcher.run("left_runs", nodes, str(tmp_path))


@pytest.mark.timeout(6 * HANG)  # a busy machine lets ranks wait for each other, many thousand times
@pytest.mark.parametrize("face", ["parallelize", "horovod"])
def test_a_thousand_models_take_no_more_memory_than_a_few(launcher, face):
    ranks = launcher.start("many_rounds", [0, 0], face)
    assert ranks.finish(5 * HANG) == [0, 0], ranks.output()


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_parallelize_again_compiled_and_with_mistakes(launcher, nodes):
    launcher.run("called_again", nodes)


@pytest.mark.parametrize("face", ["parallelize", "overlap", "horovod", "keras"])
def test_a_rank_with_fewer_batches_is_waited_for_in_vain_no_longer_than_allowed(launcher, face):
    launcher.variables["KERAS_BACKEND"] = "torch"
    ranks = launcher.start("fewer_batches", [0, 0], face)
    assert ranks.finish() == [0, 0], ranks.output()
    assert "GAVE UP" in ranks.outputs[0], ranks.output()


@pytest.mark.parametrize("face", ["parallelize", "overlap", "horovod"])
def test_a_step_after_a_pass_that_failed_is_that_of_the_others(launcher, face):
    launcher.run("failing_pass", [0, 0], face)


def test_two_ranks_exchange_tensors_of_gpus_without_the_others(launcher):
    launcher.run("pairs_of_gpus", [0, 0, 0])


def test_groups_beside_another_backend_work(launcher):
    launcher.run("beside_gloo", [0, 0, 0, 0])


def test_parallelize_says_which_ranks_have_another_model(launcher):
    ranks = launcher.start("parallel", [0, 0], "different")
    assert all(code != 0 for code in ranks.finish())
    assert "The models of rank 0 and rank 1 differ from parameter number 0 on" in ranks.output()


def test_gradients_reuse_the_memory_of_those_before(launcher):
    found = re.search(r"FAULTS (\d+)", launcher.run("freed_memory", [0, 0]).outputs[0])
    # Each of the six gradients alone has 2200 pages.
    assert found and int(found[1]) < 500
