"""Training in less memory than it needs; where the machine lets us make cgroups, the kernel is the judge."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import carme_runtime
from carme_runtime.out_of_core import pages
from carme_runtime.out_of_core.blocks import Block
from carme_runtime.out_of_core.gpu_ahead import Growth
from carme_runtime.out_of_core.gpu_store import GpuStore
from carme_runtime.out_of_core.optimizers import parameter_by_parameter
from carme_runtime.out_of_core.spill import SpillFile
from carme_runtime.out_of_core.trace import Operation, Trace
from carme_runtime.out_of_core.watch import Storage
from memory_cgroups import MemoryCgroup
from patience import HANG

from .memory_limits import MIB, limit

PROGRAM = Path(__file__).parent / "programs" / "out_of_core.py"
LIBRARIES = 255  # MiB, about
SECONDS = 3 * HANG


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def start(
    *arguments: str | int | Path, cgroup: MemoryCgroup | None = None, program: Path = PROGRAM
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=cgroup.enter if cgroup else None,
    )


def finish(process: subprocess.Popen[str], seconds: float = SECONDS) -> list[dict[str, Any]]:
    output, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


def losses(lines: list[dict[str, Any]]) -> list[str]:
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.timeout(8 * SECONDS)
@pytest.mark.parametrize(("optimizer", "times"), [("sgd", 4), ("adamw", 4), ("adamw", 8)])
def test_state_of_several_times_the_limit_trains_to_the_same_losses(
    cgroup: MemoryCgroup, tmp_path: Path, optimizer: str, times: int
) -> None:
    size = 416 * MIB  # a step of AdamW takes three tensors of 16 MiB at a time
    of_parameter = {"sgd": 12, "adamw": 16}[optimizer]  # bytes
    width = 2048
    layers = -(-times * size // (of_parameter * width * width))
    steps = 3 if times < 8 else 2  # several GB move in each
    cgroup.limit(size)

    alone = start(optimizer, width, layers, 2, cgroup=cgroup)
    alone.communicate(timeout=SECONDS)
    assert alone.returncode == -signal.SIGKILL

    longest = times * SECONDS / 2
    limited = finish(start(optimizer, width, layers, steps, size, tmp_path, cgroup=cgroup), longest)
    assert losses(limited) == losses(finish(start(optimizer, width, layers, steps), longest))
    plan = limited[-1]["plan"]
    assert plan["whole"] > 0.875 * times * size
    assert limited[-1]["peak"] <= size
    assert list(tmp_path.iterdir()) == []


def test_the_peer_whose_parameters_fsdp_offloads_trains_alike() -> None:
    """`./test bench out_of_core` runs it."""
    plain, sharded = (finish(start(*option, "adamw", 256, 4, 3)) for option in ((), ("--fsdp-offload",)))
    numbers = [[float.fromhex(loss) for loss in losses(lines)] for lines in (plain, sharded)]
    assert len(numbers[0]) == 3 and numbers[1] == pytest.approx(numbers[0], rel=1e-4)


def test_carme_run_limits_scripts_that_know_nothing_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "carme_runtime.launcher.command"]
    command += ["--memory-per-rank", f"{LIBRARIES + 20}M", "--spill", str(tmp_path)]
    arguments = [str(PROGRAM), "sgd", "512", "40", "3"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    assert losses(lines) == losses(finish(start("sgd", 512, 40, 3)))
    assert lines[-1]["peak"] < (LIBRARIES + 20) * MIB < LIBRARIES * MIB + 12 * 40 * 512 * 512


def test_keras_scripts_train_save_and_load_in_less_memory(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    program, spill = PROGRAM.with_name("keras_in_less_memory.py"), tmp_path / "spill"
    spill.mkdir()

    def run(*words: str | Path) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, *words, program, "1024", "12", tmp_path / "model.keras"],
            env=os.environ | {"KERAS_BACKEND": "torch"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1].removeprefix("[rank 0] "))

    expected = run()
    limited = run("-m", "carme_runtime.launcher.command", "--memory-per-rank", "1050M", "--spill", spill)
    assert limited["losses"] == expected["losses"]
    assert limited["peak"] <= 1050 * MIB < expected["peak"]  # so something has been moved out
    assert list(spill.iterdir()) == []


@pytest.mark.parametrize("optimizer", ["adamw_foreach", "adamw_fused"])
def test_optimizers_that_take_all_parameters_at_once_take_them_one_by_one(
    tmp_path: Path, optimizer: str
) -> None:
    limited = finish(start(optimizer, 512, 40, 3, f"{LIBRARIES + 40}M", tmp_path))
    assert limited[-1]["plan"]["measured_read"] > 40 * MIB
    assert losses(limited) == losses(finish(start(optimizer, 512, 40, 3)))


class Lists(TorchDispatchMode):
    """How many tensors each call of an operation of the optimizer took."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_foreach_lerp" in str(func):
            self.lengths.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def adamw_of_lists(sizes: list[int]) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    for each in parameters:
        each.grad = torch.randn(each.shape)
    return torch.optim.AdamW(parameters, foreach=True)


def test_a_step_ends_with_a_large_parameter_before_it_begins_with_the_next_one() -> None:
    sizes = [MIB, MIB, MIB, 8, 8]
    expected, optimizer = adamw_of_lists(sizes), adamw_of_lists(sizes)
    expected.step()
    hook = register_optimizer_step_pre_hook(parameter_by_parameter)
    try:
        with Lists() as seen:
            optimizer.step()
    finally:
        hook.remove()
    assert seen.lengths == [1, 1, 1, 2]
    assert [len(group["params"]) for group in optimizer.param_groups] == [5]
    for left, right in zip(*(each.param_groups[0]["params"] for each in (expected, optimizer)), strict=True):
        assert torch.equal(left, right)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(expected.state[left][name], optimizer.state[right][name])


@pytest.mark.parametrize("is_alive", [False, True])
def test_steps_end_with_another_optimizer_where_the_first_one_is_used_no_longer(
    tmp_path: Path, is_alive: bool
) -> None:
    model = nn.Linear(256, 256)
    with carme_runtime.memory(limit(), tmp_path) as budget:

        def train(optimizer: torch.optim.Optimizer) -> int:
            """The operations that are recorded after its step."""
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return len(budget._steps._record)

        first = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            train(first)
        alive = first if is_alive else None
        gone = weakref.ref(first)
        del first
        assert gone() is alive
        second = torch.optim.SGD(model.parameters(), lr=0.1)
        recorded = [train(second) for _ in range(40)]
        assert recorded[-20:] == [0] * 20  # nothing is recorded where a step goes as the one before
        assert budget._steps.followed


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_a_step_with_several_optimizers_ends_once(tmp_path: Path, repeats: int) -> None:
    models = [nn.Linear(256, 256) for _ in range(2)]
    first, another = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    with carme_runtime.memory(limit(), tmp_path) as budget:
        for _ in range(8):
            for model, optimizer in [(models[0], first)] + repeats * [(models[1], another)]:
                model(torch.ones(2, 256)).sum().backward()
                optimizer.step()
        assert budget._steps.count == 8


@pytest.mark.parametrize("within", ["hook", "closure"])
def test_what_changes_in_an_optimizers_groups_before_it_steps_holds_for_that_step(within: str) -> None:
    parameters = [nn.Parameter(torch.ones(MIB)) for _ in range(3)]
    late = nn.Parameter(torch.ones(MIB))
    for each in (*parameters, late):
        each.grad = torch.ones(MIB)
    optimizer = torch.optim.SGD(parameters, lr=1.0)

    def change(*_: Any) -> float:
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.add_param_group({"params": [late], "lr": 0.25})
        return 0.0

    def changing(*_: Any) -> None:
        change()

    hooks = [register_optimizer_step_pre_hook(parameter_by_parameter)]
    if within == "hook":
        hooks.append(optimizer.register_step_pre_hook(changing))
    try:
        optimizer.step(change if within == "closure" else None)
    finally:
        for hook in hooks:
            hook.remove()
    assert [each[0].item() for each in (*parameters, late)] == [0.5, 0.5, 0.5, 0.75]


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_that_pytorch_has_in_a_package_of_its_own_step_as_ever(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"This PyTorch has no {name}.")

    def create_optimizer() -> torch.optim.Optimizer:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(1024, 1024)) for _ in range(3)]
        for each in parameters:
            each.grad = torch.randn(each.shape)
        return getattr(torch.optim, name)(parameters)

    expected, optimizer = create_optimizer(), create_optimizer()
    expected.step()
    view, *_ = parameter_by_parameter(optimizer, (optimizer,), {})[0]
    assert [len(group["params"]) for group in view.param_groups] == [1, 1, 1]
    hook = register_optimizer_step_pre_hook(parameter_by_parameter)
    try:
        optimizer.step()
    finally:
        hook.remove()
    for left, right in zip(*(each.param_groups[0]["params"] for each in (expected, optimizer)), strict=True):
        assert torch.equal(left, right)


def test_an_optimizer_that_needs_all_parameters_gets_them() -> None:
    parameters = [nn.Parameter(torch.ones(2 * MIB)) for _ in range(2)]
    optimizer = torch.optim.LBFGS(parameters, max_iter=1, history_size=1)
    assert parameter_by_parameter(optimizer, (optimizer,), {}) is None


def test_what_a_gpu_needs_until_the_steps_peak_is_known() -> None:
    operations = [
        Operation("forward", (1,), makes=((10, 4),)),
        Operation("forward", (1, 10), makes=((11, 6),)),
        Operation("backward", (1, 11), makes=((12, 3),), dies=(11,)),
        Operation("step", (1, 12), (1,), dies=(10,)),
    ]
    growth = Growth(Trace(operations, {1: 5, 10: 4, 11: 6, 12: 3}, leftovers_end=0))
    # Block 12 is left to the next step, and gone before that makes its first one: after the operations there
    # are 4, 10, 7 and 3 bytes of what a step makes, and 13 at a time while the third one runs.
    assert growth.peak_at == 2
    assert growth.to_peak == growth.soon == [9, 3, 6, 10]


def test_pinned_memory_of_sizes_that_no_step_needs_any_more_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Streams and pinned memory need a GPU; what happens to the memory of blocks that are gone does not.
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(GpuStore, "_measured", lambda store: None)
    store = GpuStore(torch.device("cpu"), lambda block: 0.0)
    memory: list[weakref.ref[torch.Tensor]] = []

    def use(size: int) -> None:
        storage = torch.empty(size, dtype=torch.uint8).untyped_storage()
        block = Block(Storage(storage), storage.data_ptr(), size, 0)
        store.add(storage._cdata, block)
        twin = torch.empty(size, dtype=torch.uint8)
        memory.append(weakref.ref(twin))
        store._twins[block] = twin

    for size in range(1, 51):  # a batch of another length in each step
        use(size)
        store.end_step()
    assert [each() is None for each in memory] == [True] * 49 + [False]
    store.end_step()
    assert memory[-1]() is None


def test_what_convolutions_save_leaves_memory_too(tmp_path: Path) -> None:
    def train(budget: Any) -> list[float]:
        torch.manual_seed(0)
        parts = [
            part for _ in range(8) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())
        ]
        model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 1), *parts, nn.Flatten(), nn.LazyLinear(10))
        x = torch.randn(64, 3, 32, 32)
        model(x)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if budget:
            model, optimizer = budget.adopt(model, optimizer)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return [*found, *(each.double().sum().item() for each in model.buffers())]

    expected = train(None)
    with carme_runtime.memory(limit(room=16), tmp_path) as budget:
        assert train(budget) == expected
        plan = budget.plan()
    assert plan.measured_written > 0 and plan.blocks["activations"] > plan.room


def test_a_model_from_before_keeps_its_ties_and_can_be_saved_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    model[15].weight = model[0].weight  # type: ignore[index]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with carme_runtime.memory(limit(), tmp_path) as budget:
        model, optimizer = budget.adopt(model, optimizer)
        assert model[15].weight is model[0].weight  # type: ignore[index]
        junk = [torch.ones(MIB) for _ in range(40)]  # 160 MiB: the weights leave
        torch.save(model.state_dict(), tmp_path / "model.pt")
        assert sum(each.sum().item() for each in junk) == 40 * MIB
        assert junk[3][:2].numpy().tolist() == [1.0, 1.0]
    saved = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(saved[name], each) for name, each in before.items())


def test_memory_goes_back_to_the_kernel(tmp_path: Path) -> None:
    most = limit()
    with carme_runtime.memory(most, tmp_path):
        tensors = [torch.full((MIB,), float(i)) for i in range(60)]  # 240 MiB
        assert pages.resident() < most
        assert [each[7].item() for each in tensors] == list(range(60))
        assert pages.resident() < most


def test_what_the_program_took_for_a_while_is_free_again_afterwards(tmp_path: Path) -> None:
    with carme_runtime.memory(limit(room=60), tmp_path):
        taken = bytearray(os.urandom(1 << 10) * (50 << 10))  # 50 MiB, which tensors cannot have meanwhile
        assert torch.ones(MIB)[0] == 1
        del taken
        assert torch.ones(10 * MIB)[-1] == 1


def test_what_does_not_fit_at_the_end_is_reported_and_fails_when_it_is_used(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="do not fit into the memory limit and are gone"):
        with carme_runtime.memory(limit(), tmp_path):
            tensors = [torch.full((MIB,), float(i)) for i in range(30)]
        held = [each for each in tensors if each.untyped_storage().nbytes()]
        assert 0 < len(held) < len(tensors)
        assert all(each[0] == each[-1] for each in held)


@pytest.mark.parametrize("model", ["mlp", "conv", "transformer"])
def test_the_smallest_limit_that_is_named_works(tmp_path: Path, model: str) -> None:
    """The figures of this are in docs/users/out-of-core.md."""

    def begin(limit: str) -> subprocess.Popen[str]:
        return start(model, limit, tmp_path, program=PROGRAM.with_name("out_of_core_models.py"))

    process = begin(f"{LIBRARIES - 50}M")
    output, errors = process.communicate(timeout=SECONDS)
    for _ in range(6):  # an operation that comes later may need more
        if process.returncode == 0:
            break
        assert "The limit of" in errors and "is too small" in errors, errors
        least = errors.rpartition("Use ")[2].partition(" or more")[0]
        process = begin(least)
        output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    plan = json.loads(output.splitlines()[-1])
    assert plan["limit"] <= 1.15 * plan["least"]


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    process = start("sgd", 1024, 30, 1000, f"{LIBRARIES + 40}M", tmp_path)
    assert process.stdout and process.stdout.readline()  # it is in the midst of it
    process.kill()
    process.communicate(timeout=SECONDS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(0)  # each process has a limit of its own
def test_kills_at_any_moment_leave_nothing_after_the_next_start(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    times = request.config.getoption("--kills") or 12
    program = PROGRAM.with_name("killed_spilling.py")
    command = [sys.executable, str(program), str(tmp_path), str(times), "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("now 0\n"), done.stdout
    begun = int(done.stdout.split(" killed, ")[1].split()[0])
    assert begun > times // 4, done.stdout


def test_a_full_disk_is_reported_in_one_sentence(tmp_path: Path) -> None:
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(96 * MIB)
    if os.geteuid() != 0 or subprocess.run(["mkfs.ext4", "-q", image], check=False).returncode:
        pytest.skip("a small file system needs root and mkfs.ext4")
    mounted = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file cannot be mounted here: {mounted.stderr.decode()}")
    try:
        process = start("sgd", 1024, 40, 2, f"{LIBRARIES + 20}M", folder)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert process.returncode == 1
    assert f"The disk of the spill folder '{folder}' is full" in errors
    assert "Free some room there, or name another folder." in errors


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_disk_that_fails_while_training_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
    saved = model.state_dict()
    torch.save(saved, tmp_path / "checkpoint.pt")
    (folder := tmp_path / "spill").mkdir()

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "as the kernel says it")

    with pytest.raises(carme_runtime.CarmeRuntimeError, match="failed: Input/output error"):  # noqa: SIM117
        with carme_runtime.memory(limit(), folder) as budget:
            adopted, optimizer = budget.adopt(
                model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            )
            monkeypatch.setattr(SpillFile, operation, fail)
            for _ in range(3):
                adopted(torch.ones(4, 1024)).sum().backward()
                optimizer.step()
    assert list(folder.iterdir()) == []
    assert torch.load(tmp_path / "checkpoint.pt").keys() == saved.keys()
    monkeypatch.undo()
    with carme_runtime.memory(limit(), folder):  # the next one may begin
        pass


@pytest.mark.parametrize(
    ("limit_text", "folder", "says"),
    [
        ("1MiB", ".", "is too small: Python and its libraries already take"),
        ("many", ".", "'many' is not a size of memory"),
        ("64GiB", "/dev/shm", "is memory itself (tmpfs)"),
        ("64GiB", "missing", "does not exist"),
        ("64GiB", "/proc/self", "cannot be written"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(limit_text: str, folder: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(carme_runtime.CarmeRuntimeError, match=re.escape(says)):
        carme_runtime.memory(limit_text, tmp_path / folder).__enter__()


def test_two_limits_at_a_time_are_refused(tmp_path: Path) -> None:
    with carme_runtime.memory(limit(), tmp_path) as budget:
        with pytest.raises(carme_runtime.CarmeRuntimeError, match="in force already"):
            carme_runtime.memory(limit(), tmp_path).__enter__()
        with pytest.raises(carme_runtime.CarmeRuntimeError, match="No step has been recorded yet"):
            budget.plan()
    with pytest.raises(carme_runtime.CarmeRuntimeError, match="is not in force"):
        budget.plan()


def test_worker_processes_of_a_loader_work_beside_it(tmp_path: Path) -> None:
    with carme_runtime.memory(limit(), tmp_path):
        big = [torch.full((MIB,), float(i)) for i in range(30)]
        loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, batch_size=None)
        assert sum(each.item() for each in loader) == 28
        assert [each[5].item() for each in big] == list(range(30))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "no folder"),
        ({"device": "cuda", "spill": "."}, "Leave spill out"),
        ({"device": "xpu"}, "There is no NVIDIA GPU 'xpu'"),
    ],
)
def test_devices_and_folders_that_do_not_go_together_are_refused(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(carme_runtime.CarmeRuntimeError, match=words):
        carme_runtime.memory("1GiB", **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a GPU; tests/gpu limits it.")
def test_without_a_gpu_none_can_be_limited() -> None:
    with pytest.raises(carme_runtime.CarmeRuntimeError, match="Leave device out"):
        carme_runtime.memory("1GiB", device="cuda")
