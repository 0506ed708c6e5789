"""`carme-run --scale-probe` with scripts of PyTorch and of Keras, and advice in a program."""

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from carme_runtime import fusion, scaling
from carme_runtime.scaling import Machine, measuring
from carme_runtime.scaling.measuring import filled_part, measured
from carme_runtime.scaling.replay import Call, Repeated, Result
from carme_runtime.scaling.sampling import LOADING, Step, factor
from carme_runtime.scaling.watching import Watch, _fixed_ms
from carme_runtime.torch import parallel
from carme_runtime.torch.options import Options
from patience import HANG

PROGRAM = Path(__file__).parent / "programs/scaled.py"
KERAS_PROGRAM = PROGRAM.with_name("scaled_keras.py")
BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks/scaling.py"
COMMAND = [sys.executable, "-c", "from carme_runtime.commands import run; run()"]


def probe(
    folder: Path, kind: str, *options: str, program: Path = PROGRAM, backend: str = "torch"
) -> subprocess.CompletedProcess[str]:
    command = [
        *COMMAND,
        "-n",
        "1",
        "--scale-probe",
        "--scale-seconds",
        "2",
        *options,
        str(program),
        kind,
        "2",
    ]
    environment = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG)


@pytest.mark.parametrize(
    ("kind", "model", "gradients"),
    [
        ("plain", "Sequential", 6),
        ("module", "Sequential", 6),
        ("a step before", "Sequential", 6),
        ("named", "Named", 2),
        ("keras", "Sequential", 4),
    ],
)
def test_a_script_is_measured_without_a_change(tmp_path: Path, kind: str, model: str, gradients: int) -> None:
    done = probe(tmp_path, kind, "--network", "10 Gbit/s, 20 us")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Strong scaling" in done.stdout and "the script went on" not in done.stdout
    profile = scaling.load(tmp_path / "scale.json")
    assert (profile.model, profile.batch, len(profile.gradients)) == (model, 32, gradients)
    # BatchNorm does not train with a single sample.
    smallest = 0 if kind in ("named", "keras") else 1
    assert [timing.samples for timing in profile.timings] == [1, 2, 4, 8, 16, 32][smallest:]
    assert profile.links.source == "given: 10 Gbit/s, 20 us"
    last, first = profile.gradients[-1], profile.gradients[0]
    assert 0 <= last.ready[-1] <= first.ready[-1] <= 1  # backpropagation ends with the first layer
    assert profile.memory.fixed_bytes >= 4 * profile.bytes and profile.memory.limit_bytes > 0
    assert profile.input.samples_per_s > 0  # Keras loads with a DataLoader, too


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("short", "The script ended after 5 steps, and the probe needs 7. Let it train longer."),
        ("uneven", "The script draws batches of different sizes ("),
        (
            "memory",
            "The script ran out of memory when it wanted 4294967296.00 GiB more. Use a smaller batch.",
        ),
        ("python's memory", "The script ran out of memory. Use a smaller batch."),
        (
            "broken probe",
            "The probe itself failed when it measured the script's steps (ValueError: an odd number). The "
            "script is not at fault. Report this to your administrators.",
        ),
        ("idle", "The script made no step with PyTorch or Keras, so nothing was measured."),
    ],
)
def test_a_script_that_cannot_be_measured(tmp_path: Path, kind: str, sentence: str) -> None:
    (tmp_path / "scale.json").write_text("of an earlier run")
    done = probe(tmp_path, kind)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count(sentence) == 1 and "Traceback" not in done.stderr
    assert "ended with exit code" not in done.stderr  # one sentence, by one of the two
    assert "scale.json still holds the result of an earlier probe." in done.stderr
    assert [file.read_text() for file in tmp_path.iterdir()] == ["of an earlier run"]


def test_links_that_cannot_be_read_are_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARME_LINKS", str(tmp_path / "links.json"))
    done = probe(tmp_path, "idle")
    assert done.returncode == 2 and "made no step" not in done.stderr, done.stdout + done.stderr
    assert done.stderr.count("CARME_LINKS names ") == 1 and not done.stdout
    with pytest.raises(scaling.ScalingError, match="The network 'fast' cannot be read"):
        scaling.advise(nn.Linear(2, 2), [torch.ones(4, 3)], network="fast")
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(2 * HANG)
@pytest.mark.parametrize("kind", ["plain", "compiled", "own step", "batches", "ranks"])
def test_keras_on_tensorflow_is_measured_without_a_change(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("tensorflow")
    options = ("--network", "10 Gbit/s, 20 us")
    done = probe(tmp_path, kind, *options, program=KERAS_PROGRAM, backend="tensorflow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Strong scaling" in done.stdout and "the script went on" not in done.stdout
    profile = scaling.load(tmp_path / "scale.json")
    model = "OwnStep" if kind == "own step" else "Sequential"
    assert (profile.model, profile.batch, len(profile.gradients)) == (model, 32, 6)
    assert profile.timings[-1].samples == 32 and profile.timings[-1].backward_ms > 0
    assert profile.bytes == 4 * (32 * 256 + 3 * 256 + 256 * 4 + 4)
    assert profile.memory.fixed_bytes >= 4 * profile.bytes and profile.memory.limit_bytes > 0
    assert (profile.input.samples_per_s > 0) is (kind != "batches")  # the script itself has the batches there
    is_seen = kind in ("plain", "batches", "ranks")  # in a step that is neither compiled nor the script's own
    assert profile.has_late_gradients is not is_seen
    assert ("All gradients are taken to be complete at the end" in done.stdout) is not is_seen
    if is_seen:
        assert max(part.ready[-1] for part in profile.gradients[:2]) > 0.9  # of the first layer
        last, first = profile.gradients[-1], profile.gradients[0]
        assert 0 <= last.ready[-1] < first.ready[-1] <= 1  # backpropagation ends with the first layer


@pytest.mark.timeout(2 * HANG)
@pytest.mark.parametrize(
    ("kind", "batch"),
    [("small last batches", 300), ("small last batches of ranks", 300), ("some small batches", 32)],
)
def test_keras_on_tensorflow_is_measured_with_the_usual_batch(tmp_path: Path, kind: str, batch: int) -> None:
    """Each fourth batch is smaller, and 40 steps are watched after 3: they are enough before a fourth one."""
    pytest.importorskip("tensorflow")
    done = probe(tmp_path, kind, "--scale-seconds", "5", program=KERAS_PROGRAM, backend="tensorflow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ran out of data" not in done.stderr
    profile = scaling.load(tmp_path / "scale.json")
    assert (profile.batch, profile.timings[-1].samples) == (batch, batch)


@pytest.mark.timeout(2 * HANG)
def test_a_single_step_before_fit_does_not_end_a_script_that_loads_for_long(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    done = probe(tmp_path, "a step before", program=KERAS_PROGRAM, backend="tensorflow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert scaling.load(tmp_path / "scale.json").batch == 32


@pytest.mark.timeout(2 * HANG)
def test_the_memory_of_a_sample_in_keras_on_tensorflow(tmp_path: Path) -> None:
    """By its own account: it keeps what it once had. Tensors of less than 256 KiB are left out there."""
    pytest.importorskip("tensorflow")
    done = probe(tmp_path, "wide", program=KERAS_PROGRAM, backend="tensorflow")
    assert done.returncode == 0, done.stdout + done.stderr
    profile = scaling.load(tmp_path / "scale.json")
    assert profile.memory.bytes_per_sample > 4 * 8192  # the hidden layer's values


@pytest.mark.timeout(2 * HANG)
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("short", "The script ended after 5 steps, and the probe needs 7. Let it train longer."),
        ("uneven", "The script draws batches of different sizes ("),
        ("loop", "The script trains in a loop of its own, and on TensorFlow the probe sees steps of Keras'"),
        ("endless loop", "The script trains in a loop of its own, and on TensorFlow the probe sees steps"),
    ],
)
def test_keras_on_tensorflow_that_cannot_be_measured(tmp_path: Path, kind: str, sentence: str) -> None:
    pytest.importorskip("tensorflow")
    done = probe(tmp_path, kind, program=KERAS_PROGRAM, backend="tensorflow")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count(sentence) == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "scale.json").exists()


@pytest.mark.timeout(2 * HANG)
def test_an_error_in_keras_on_tensorflow_stays_its_own(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    done = probe(tmp_path, "error", program=KERAS_PROGRAM, backend="tensorflow")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    assert "--scale-probe:" not in done.stderr


@pytest.mark.timeout(2 * HANG)
def test_keras_on_jax_is_refused_with_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    done = probe(tmp_path, "plain", program=KERAS_PROGRAM, backend="jax")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the script went on" not in done.stdout  # it ends when training begins
    assert done.stderr.count("Keras on JAX cannot be measured") == 1


def test_an_error_of_the_script_stays_its_own(tmp_path: Path) -> None:
    done = probe(tmp_path, "error")
    assert done.returncode == 1 and "ValueError: of the script's own" in done.stderr
    assert "--scale-probe:" not in done.stderr


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for options, sentence in (
        (("--network", "fast"), "The network 'fast' cannot be read."),
        (("-n", "2"), "--scale-probe measures one rank."),
        (("--network", ""), "The network '' cannot be read."),
        (("--scale-seconds", "500"), "--scale-seconds 500 is not possible."),
    ):
        done = probe(tmp_path, "plain", *options)
        assert done.returncode == 2 and sentence in done.stderr


NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell("%load_ext carme_runtime.notebook")
line = f"--scale-seconds 2 --network '10 Gbit/s, 20 us' '{sys.argv[1]}'"
found = shell.run_line_magic("carme_scale", f"{line} plain")
print("CURVE", "<svg" in found._repr_html_(), "given: 10 Gbit/s, 20 us" in repr(found))
try:
    shell.run_line_magic("carme_scale", f"{line} short")
except Exception as error:
    print("REFUSED", error)
"""


def test_a_line_of_a_notebook_draws_how_a_script_scales(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    environment = os.environ | {"IPYTHONDIR": str(tmp_path / "ipython")}
    command = [sys.executable, "-c", NOTEBOOK, str(PROGRAM)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=2 * HANG
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CURVE True True" in done.stdout
    output = done.stdout + done.stderr
    assert "The script ended after 5 steps, and the probe needs 7." in output
    assert "REFUSED the probe ended with exit code 2; its output above says why." in output


def test_advice_leaves_the_model_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4))
    model(torch.randn(8, 8)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    state = torch.get_rng_state()
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    loader = DataLoader(data, batch_size=16)
    torch.set_rng_state(state)
    advice = scaling.advise(model, loader, loss=nn.functional.cross_entropy, seconds=0.1, upto=8)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert "Strong scaling" in str(advice) and "<svg" in advice._repr_html_()
    assert {layer.kind for layer in advice.profile.layers} >= {"Linear", "BatchNorm1d"} or len(
        advice.profile.timings
    ) == 1


def test_advice_without_batches() -> None:
    with pytest.raises(scaling.ScalingError, match="The loader has no batch"):
        scaling.advise(nn.Linear(2, 2), [])
    with pytest.raises(scaling.ScalingError, match="holds no tensor"):
        scaling.advise(nn.Linear(2, 2), [["text"]])
    with pytest.raises(scaling.ScalingError, match="cannot be made again"):
        scaling.advise(nn.Linear(2, 2), [torch.ones(4, 3)])


def test_a_step_is_made_again_with_part_of_its_samples() -> None:
    seen: list[int] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, values: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
            seen.append(len(values))
            assert len(fixed) == 3
            return self.layer(values)

    model, loss = Layer(), nn.MSELoss()
    calls = [
        Call(model, model, (torch.ones(8, 2), torch.ones(3)), {}),
        Call(loss, loss, (Result(0, 0), torch.ones(8, 2)), {}),
    ]
    repeated = Repeated(calls, 8)
    run = repeated.run(4)
    assert seen == [4] and run.forward > 0 and run.backward > 0
    assert set(run.ready) == {id(parameter) for parameter in model.parameters()}
    assert all(0 <= moment <= run.backward for moment in run.ready.values())


def test_a_step_is_made_again_in_the_precision_of_the_script(tmp_path: Path) -> None:
    """Not in that of the place where the probe measures, which is after the script's autocast."""
    seen: list[torch.dtype] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            result = self.layer(values)
            seen.append(result.dtype)
            return result

    for is_on, number_type in ((True, torch.bfloat16), (False, torch.float32)):
        seen.clear()
        watch, model = Watch(tmp_path / "scale.json", None, 60.0), Layer()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            watch.called(model, nn.Module.__call__, (torch.ones(8, 2),), {})
        Repeated(watch._notes.calls, 8).run(4)
        assert seen == [number_type, number_type]


def test_what_a_step_takes_besides_its_passes_has_no_noise_of_passes() -> None:
    """Passes differ by half a second from step to step here, and the optimizer takes 10 ms in each."""
    lengths = [1.0, 1.5, 1.2, 1.1, 1.4]
    steps = [Step(3 * each + 0.01 + 0.005, 0.005, each, 2 * each, 8) for each in lengths]
    watched = [[1000 * step.forward for step in steps], [1000 * step.backward for step in steps]]
    assert _fixed_ms(steps, watched, [[900.0], [2500.0]]) == pytest.approx(10)
    # The script's forward passes take five times as long: one part of five is taken to be fixed.
    assert _fixed_ms(steps, watched, [[240.0], [2500.0]]) == pytest.approx(10 + 1200 - 4 * 240)
    # Nobody saw the script's backward passes, which then take what they take when they are made again.
    unseen = [Step(3 * each + 0.01, 0.0, each, 0.0, 8) for each in lengths]
    alone = [watched[0], [0.0] * 5]
    assert _fixed_ms(unseen, alone, [[900.0], [2390.0]]) == pytest.approx(2400 + 10 - 2390)


@pytest.mark.parametrize("longer", [0.98, 0.6, 1.02, 1.5])
def test_a_predicted_step_of_one_rank_is_the_watched_one_but_for_noise(longer: float) -> None:
    """What is taken for noise is no fixed work, which would limit many ranks."""
    noise = [0.95, 1.0, 1.05, 0.9, 1.1]
    steps = [Step(0.31 * each + 0.01, 0.0, 0.1 * each, 0.21 * each, 8) for each in noise]
    watched = [[100.0 * each for each in noise], [210.0 * each for each in noise]]
    again = [[part / longer for part in watched[0]], [part / longer for part in watched[1]]]
    fixed = _fixed_ms(steps, watched, again)
    assert fixed == pytest.approx(10)
    predicted = sum(factor(*pair) * statistics.median(pair[1]) for pair in zip(watched, again, strict=True))
    assert predicted + fixed == pytest.approx(320, rel=0.02)
    assert (predicted + fixed < 320) is (longer > 1), "both directions"


def test_batches_that_are_compiled_for_long_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 20 of the 36 seconds here when it is met for the first time."""
    now, met = 0.0, set[int]()
    run = Repeated.run

    def slow(repeated: Repeated, samples: int) -> Any:
        nonlocal now
        now += 20.0 * (samples not in met)
        met.add(samples)
        return run(repeated, samples)

    monkeypatch.setattr(Repeated, "run", slow)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: now))
    model = nn.Linear(2, 2)
    timings, *_ = measured(Repeated([Call(model, model, (torch.ones(64, 2),), {})], 64), 64, 36.0)
    assert [timing.samples for timing in timings] == [16, 32, 64]


def test_predicted_buckets_are_those_that_parallelize_makes() -> None:
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    # A single rank reduces in buckets where it accumulates.
    wrapped = parallel.Parallel(model, optimizer, Options(accumulate=2))
    sizes = [4 * p.numel() for p in reversed(list(model.parameters()))]
    limit = fusion.BUCKET_BYTES
    expected = fusion.fill(sizes, [""] * len(sizes), limit, limit)
    assert [len(bucket.parameters) for bucket in wrapped._buckets] == [len(numbers) for numbers in expected]
    assert Machine().ranks_per_node == 1


@pytest.mark.timeout(4 * HANG)
def test_the_benchmark_predicts_steps_of_two_ranks_of_a_node(tmp_path: Path) -> None:
    """What its figures are worth is for a quiet machine to say; here they only have to come.

    Where time is short there is one round.
    """
    result = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARK), "--rounds", "9", "--minutes", "0.01", "--rates", "node"]
    command += ["--models", "mlp", "--probes", "mlp", "--json", str(result)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3 * HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run 1 of 1: 2 ranks, node" in done.stderr
    assert "mlp, 2 ranks, node, round 1 of 9: " in done.stderr
    content = json.loads(result.read_text())
    assert (content["complete"], content["nodes"]) == (True, "namespaces")
    names = [row["name"] for row in content["aims"]]
    assert names[0] == "predicted_step_ms_mlp_2_node" and names[-2:] == ["coverage", "probe_seconds_mlp"]
    rounds = content["rounds"]["2"]["node"]["mlp"]
    assert len(rounds) == 1
    for each in rounds:
        assert 0 < each["low"] <= each["predicted"] <= each["high"] and each["communication"] > 0
        assert each["measured"] > 0 and each["simple"] > 0


@pytest.mark.parametrize(("each", "batches"), [(0.5, 18), (6.0, 2), (13.5, 2), (13.6, 1), (600.0, 1)])
def test_the_rate_of_slow_input_takes_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, each: float, batches: int
) -> None:
    """Of a minute's probe nine seconds, or 27 for the second batch."""
    now, drawn = 0.0, 0
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now))

    def loader() -> Iterator[torch.Tensor]:
        nonlocal now, drawn
        while True:
            now, drawn = now + each, drawn + 1
            yield torch.ones(32, 2)

    found = measuring.input_of(loader(), LOADING * 60)
    assert (drawn, found.samples_per_s) == (batches, pytest.approx(32 / each))


def test_the_part_of_a_gradient_that_travels_is_measured() -> None:
    """Of an embedding's rows each batch has a few; a row of 64 numbers is one block of the core."""
    table = nn.Embedding(1000, 64)
    words = torch.arange(16).view(16, 1)
    calls = [Call(table, table, (words,), {})]
    _, (gradient,), _ = measured(Repeated(calls, 16), 16, 60.0)
    assert gradient.filled == pytest.approx([1e-3, 2e-3, 4e-3, 8e-3, 16e-3])
    assert filled_part(torch.ones(1000)) == 1.0 and filled_part(torch.zeros(1024)) == 0.0
    assert filled_part(torch.cat([torch.ones(1024 - 192), torch.zeros(192)])) == 1.0  # less than a quarter
    assert filled_part(None) == 1.0 and filled_part(torch.zeros(3)) == 1.0


@pytest.mark.parametrize(("text", "goes_on"), [("not enough memory: you tried to", True), ("a fault", False)])
def test_a_probe_goes_on_without_memory_to_look_for_zeros(
    monkeypatch: pytest.MonkeyPatch, text: str, goes_on: bool
) -> None:
    """All of a gradient then counts as filled. What has other causes is an error."""

    def refused(_: torch.Tensor | None) -> float:
        raise RuntimeError(text)

    monkeypatch.setattr(measuring, "filled_part", refused)
    table = nn.Embedding(1000, 64)
    repeated = Repeated([Call(table, table, (torch.arange(4).view(4, 1),), {})], 4)
    if goes_on:
        timings, (gradient,), _ = measured(repeated, 4, 60.0)
        assert len(timings) == 3 and gradient.filled == ()
    else:
        with pytest.raises(RuntimeError, match=text):
            measured(repeated, 4, 60.0)


@pytest.mark.timeout(4 * HANG)
@pytest.mark.parametrize(("nodes", "per_node", "computes"), [([0, 1], 1, True), ([0, 0], 2, False)])
def test_what_reducing_takes_is_measured_beside_the_passes_of_the_model(
    launcher: Any, nodes: list[int], per_node: int, computes: bool
) -> None:
    """Between nodes. Ranks of one node reduce when they have nothing to compute."""
    ranks = launcher.run("measured_machine", nodes, str(per_node), "0")
    found = re.findall(r"calls (\d+) host (\d+\.\d+|\d\S*e-\d+),", ranks.output())
    assert len(found) == 2, ranks.output()
    for calls, host in found:
        assert (int(calls) > 10) is computes
        assert 0 <= float(host) < 1000


def test_slow_passes_are_not_measured_by_a_single_one(launcher: Any) -> None:
    """Three rounds at least, each of three passes alone and one beside reducing, after one that warms up."""
    ranks = launcher.run("measured_machine", [0, 1], "1", "1")
    found = re.findall(r"calls (\d+) host", ranks.output())
    assert len(found) == 2 and all(int(calls) >= 1 + 3 * (3 + 1) for calls in found), ranks.output()
