"""The policy of training beyond memory: sizes, the spill file's free parts, recorded steps. No PyTorch."""

import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carme_runtime import CarmeRuntimeError
from carme_runtime.launcher.arguments import parse
from carme_runtime.out_of_core import spill, start
from carme_runtime.out_of_core import trace as recorded
from carme_runtime.out_of_core.extents import Extents
from carme_runtime.out_of_core.gpu_spares import Spares
from carme_runtime.out_of_core.sizes import parse_size, show_size
from carme_runtime.out_of_core.trace import DoesNotFit, Operation, Trace
from patience import HANG

SECOND = 1 << 20  # bytes that the disk of these tests moves in one
RATES = (SECOND, SECOND)


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("2G", 2 << 30), ("512 MB", 512 * 10**6), ("1.5k", 1536), (77, 77)]
)
def test_sizes_are_read_as_slurm_reads_them(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "2 gallons", "1e9"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(CarmeRuntimeError, match="is not a size of memory"):
        parse_size(text)


def test_sizes_are_shown_in_their_unit() -> None:
    assert [show_size(n) for n in (5, 2048, 3 << 20, 3 << 29)] == ["5 B", "2 KiB", "3.0 MiB", "1.50 GiB"]


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=60))
def test_parts_of_the_spill_file_never_overlap_and_all_come_back(requests: list[tuple[int, bool]]) -> None:
    extents = Extents()
    taken: list[tuple[int, int]] = []
    for length, gives_back in requests:
        if gives_back and taken:
            extents.give(*taken.pop(len(taken) // 2))
        offset = extents.take(length)
        if offset is None:
            extents.grow(extents.shortage(length))
            offset = extents.take(length)
            assert offset is not None
        taken.append((offset, length))
        assert all(sum(first) <= second[0] for first, second in pairwise(sorted(taken)))
        assert extents.free + sum(length for _, length in taken) == extents.size
    for part in taken:
        extents.give(*part)
    assert extents.size == 0 or extents.take(extents.size) == 0


@pytest.mark.parametrize(("name", "says"), [("missing", "does not exist"), ("file", "is not a folder")])
def test_a_path_that_is_not_a_folder_is_refused(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CarmeRuntimeError, match=says):
        spill.SpillFile(tmp_path / name)


def test_memory_is_no_place_to_spill_to() -> None:
    with pytest.raises(CarmeRuntimeError, match=r"is memory itself \(tmpfs\)"):
        spill.SpillFile("/dev/shm")


def step_of(order: list[int], sizes: dict[int, int], *, writes: bool = False) -> Trace:
    """A step whose operations use one block each; all blocks are there before."""
    return Trace([Operation("use", (b,), (b,) if writes else (), seconds=0.01) for b in order], sizes)


def fewest_reads(order: list[int], room: int) -> int:
    """Of equal blocks, by trying everything, for two steps; Belady's count is that of the second."""
    states = {frozenset[int](): 0}
    for block in order:
        found: dict[frozenset[int], int] = {}
        for present, cost in states.items():
            if block in present:
                found[present] = min(found.get(present, cost), cost)
                continue
            leave = [present - {out} for out in present] if len(present) == room else [present]
            for rest in leave:
                now = rest | {block}
                found[now] = min(found.get(now, math.inf), cost + 1)  # type: ignore[type-var]
        states = found
    return int(min(states.values()))


orders = st.lists(st.integers(0, 4), min_size=1, max_size=9)


@given(orders, st.integers(1, 5))
def test_no_order_of_leaving_reads_less(order: list[int], room: int) -> None:
    trace = step_of(order, dict.fromkeys(order, 1))
    alone = trace.traffic(room, *RATES)
    # In the long run nothing is better: many steps cost at least as many reads as the plan says, but for the
    # ends, at which each block that fits may come once more or less.
    steps = 4
    assert alone.read * steps <= fewest_reads(order * steps, room) + steps * 0 + min(room, len(set(order)))
    assert alone.written == 0


@given(orders, st.booleans())
def test_what_fits_is_not_moved(order: list[int], writes: bool) -> None:
    trace = step_of(order, dict.fromkeys(order, 3), writes=writes)
    traffic = trace.traffic(3 * len(set(order)), *RATES)
    assert traffic.moved == 0
    assert traffic.seconds == pytest.approx(trace.seconds)
    assert trace.whole == 3 * len(set(order)) and trace.least == 3


@given(orders, st.integers(1, 4), st.booleans())
def test_more_room_never_costs_more_and_time_is_above_the_floor(
    order: list[int], room: int, writes: bool
) -> None:
    trace = step_of(order, dict.fromkeys(order, SECOND), writes=writes)
    tight, roomy = (trace.traffic(size * SECOND, *RATES) for size in (room, room + 1))
    assert roomy.read <= tight.read
    assert tight.seconds >= trace.seconds - 1e-9
    assert tight.seconds <= trace.seconds + tight.moved / SECOND + 1e-6


def test_changed_blocks_are_written_once_and_others_never() -> None:
    sizes = {1: 10, 2: 20}
    assert step_of([1, 2], sizes).traffic(20, *RATES).written == 0
    assert step_of([1, 2], sizes, writes=True).traffic(20, *RATES).written == 30


def test_what_a_step_makes_and_loses_is_moved_only_in_between() -> None:
    operations = [
        Operation("make", makes=((1, 10),)),
        Operation("other", (2,)),
        Operation("use", (1,), dies=(1,)),
    ]
    trace = Trace(operations, {1: 10, 2: 10})
    assert trace.whole == 20
    assert trace.traffic(20, *RATES).moved == 0
    traffic = trace.traffic(10, *RATES)
    assert (traffic.written, traffic.read) == (10, 20)
    with pytest.raises(DoesNotFit):
        trace.traffic(9, *RATES)


def test_what_is_soon_gone_is_not_written_where_a_clean_block_gives_as_much_room() -> None:
    """As a gradient after the optimizer's step: nothing reads block 1, and it is gone after operation 3."""
    operations = [
        Operation("use", (0,)),
        Operation("make", makes=((1, 10),)),
        *(Operation("use", (block,)) for block in (2, 3, 4, 5)),
    ]
    operations[3].dies = (1,)
    traffic = Trace(operations, dict.fromkeys(range(6), 10)).traffic(30, *RATES)
    # Written for nothing it would be 10 bytes more there, and 10 less to be read.
    assert (traffic.written, traffic.read) == (0, 30)
    # Where nothing else gives the room, it leaves.
    operations = [Operation("make", makes=((1, 10),)), Operation("use", (2,)), Operation("end", dies=(1,))]
    assert Trace(operations, {1: 10, 2: 10}).traffic(10, *RATES).written == 10


def test_clean_blocks_leave_in_place_of_what_is_soon_gone_only_if_they_give_enough_room() -> None:
    """Blocks 0 and 2 give 6 bytes of the 10 that block 3 needs, so block 1 would be written all the same."""
    operations = [
        Operation("use", (0,)),
        Operation("use", (2,)),
        Operation("make", makes=((1, 10),)),
        Operation("make", makes=((3, 10),)),
        Operation("end", dies=(1, 3)),
        Operation("use", (0,)),
        Operation("use", (2,)),
    ]
    traffic = Trace(operations, {0: 3, 1: 10, 2: 3, 3: 10}).traffic(16, *RATES)
    assert (traffic.written, traffic.read) == (10, 0)


def test_more_spare_room_than_for_one_block_costs_little() -> None:
    """The more room for blocks that come early, the more of it is transferred while others are computed."""
    for layers, room, spare in ((16, 24, 1), (40, 64, 3), (80, 160, 4)):
        step = step_of_layers(layers)
        fewest = step.traffic(room * SECOND, *RATES).moved
        found = step.order(room * SECOND, 8, *RATES)
        assert found.spare == spare
        assert spare == 1 or found.traffic.moved <= 1.04 * fewest


def step_of_layers(count: int) -> Trace:
    """Operations that change four blocks each and take as long as it takes to move these out and in."""
    blocks = [tuple(range(4 * layer, 4 * layer + 4)) for layer in range(count)]
    operations = [Operation("use", each, each, seconds=8.0) for each in blocks]
    return Trace(operations, dict.fromkeys(range(4 * count), SECOND))


def test_the_next_blocks_are_read_while_others_are_used_and_before_these_are_written() -> None:
    step = step_of_layers(80)
    found = step.order(160 * SECOND, 8, *RATES)
    assert found.traffic.moved > 0.5 * SECOND * step.seconds
    assert found.traffic.seconds == pytest.approx(step.seconds)
    # With no room for them but that of the blocks that leave nothing comes early.
    assert step.traffic(160 * SECOND, *RATES).seconds > 1.3 * step.seconds


def test_what_the_next_step_takes_moves_by_the_number_that_it_has_there() -> None:
    """Block 1 is made, and called 2 in the next step, which uses it once; block 0 needs the room between."""
    operations = [
        Operation("use", (2,), dies=(2,)),
        Operation("make", makes=((1, 10),)),
        Operation("use", (0,)),
    ]
    sizes = dict.fromkeys(range(3), 10)
    trace = Trace(operations, sizes, carried={1: 2})
    assert (trace.next_use(1, 1), trace.next_use(2, 0)) == (3, math.inf)
    assert trace.gone[1] == 3
    roomy, tight = trace.order(20, 0, *RATES), trace.order(10, 0, *RATES)
    assert (roomy.traffic.moved, roomy.leaving) == (0, {})
    # Each step writes it as 1 and reads it as 2, and reads block 0.
    assert (tight.traffic.written, tight.traffic.read) == (10, 20)
    assert {1: [1]}.items() <= tight.leaving.items()


@pytest.mark.parametrize("room", range(13, 24))
def test_what_the_next_step_takes_may_be_larger_there(room: int) -> None:
    """Block 2 needs more room than block 1 gives, beside block 0; the next step uses it last."""
    operations = [
        Operation("change", (0,), (0,)),
        Operation("use", (2,), dies=(2,)),
        Operation("make", makes=((1, 5),)),
        Operation("change", (0,), (0,)),
    ]
    trace = Trace(operations, {0: 10, 1: 5, 2: 8}, carried={1: 2})
    found = trace.order(room, 0, *RATES)
    assert trace.least == 10
    # Block 0 moves out and in for block 2, which moves where it does not fit beside.
    assert bool(found.traffic.moved) == (room < 18)
    assert ({2: [1]}.items() <= found.leaving.items()) == (room < 18)


def test_an_order_is_tried_with_few_rooms_where_steps_are_long_and_with_one_where_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer waits meanwhile, so what is counted is operations that are played through."""
    sizes = dict.fromkeys(range(8), 16)
    step = step_of(list(range(8)), sizes, writes=True)
    found = step.order(64, 4, *RATES)
    tried = step.played
    assert 3 * 3 * len(step) <= tried <= 6 * 3 * len(step)
    again = step.order(66, 4, *RATES, known=found)
    assert step.played - tried == 3 * len(step)
    assert (again.spare, again.room) == (found.spare, 66 - found.spare * 4)
    # Too little room for as many blocks besides: all is tried again.
    assert step.order(16, 4, *RATES, known=found).room <= 16
    monkeypatch.setattr(recorded, "_MOST_PLAYED", 0)
    long = step_of(list(range(8)), sizes, writes=True)
    long.order(64, 4, *RATES)
    assert long.played == 3 * 3 * len(long)  # two rooms, and one of them with changed blocks leaving earlier


def test_a_known_order_has_spare_room_where_blocks_move_and_none_where_they_do_not() -> None:
    step = step_of(list(range(8)), dict.fromkeys(range(8), 16), writes=True)
    all_fit = step.order(128, 4, *RATES)
    assert (all_fit.spare, all_fit.traffic.moved) == (0, 0)
    shrunk = step.order(112, 4, *RATES, known=all_fit)
    assert (shrunk.spare, shrunk.room) == (1, 105) and shrunk.traffic.moved
    tried = step.order(64, 4, *RATES)
    assert tried.spare
    before = step.played
    grown = step.order(130, 4, *RATES, known=tried)
    assert (grown.spare, grown.room, grown.traffic.moved, grown.leaving) == (0, 130, 0, {})
    assert step.played - before == 3 * len(step)
    # With room for the blocks of a step alone those that the step before left behind move.
    operations = [
        Operation("make", makes=((1, 10),)),
        Operation("use", (0,), dies=(1,)),
        Operation("make", makes=((2, 10),)),
    ]
    leaving = Trace(operations, dict.fromkeys(range(3), 10), leftovers_end=1)
    assert leaving.whole == 20
    all_fit = leaving.order(40, 4, *RATES)
    shrunk = leaving.order(20, 4, *RATES, known=all_fit)
    assert all_fit.spare == all_fit.traffic.moved == 0
    assert shrunk.spare == 1 and shrunk.traffic.moved


def test_what_an_operation_uses_stays_also_if_nothing_else_is_soon_gone() -> None:
    """Block 1 is made at a step's end, and the next step uses it once more before it is gone."""
    operations = [
        Operation("use", (1, 2), dies=(1,)),
        Operation("change", (3,), (3,)),
        Operation("make", makes=((1, 10),)),
        Operation("change", (3,), (3,)),
    ]
    traffic = Trace(operations, {1: 10, 2: 10, 3: 10}, leftovers_end=1).traffic(20, *RATES)
    # Blocks 2 and 3 share the place beside block 1: each comes once, and block 3 is changed.
    assert (traffic.written, traffic.read) == (10, 20)


def test_workspace_counts() -> None:
    trace = Trace([Operation("convolution", (1,), makes=((2, 5),), workspace=7, dies=(2,))], {1: 3, 2: 5})
    assert trace.least == trace.whole == 15
    with pytest.raises(DoesNotFit):
        trace.traffic(14, *RATES)


@given(orders)
def test_the_next_use_is_that_of_the_step_or_of_the_next_one(order: list[int]) -> None:
    trace = step_of(order, dict.fromkeys(order, 1))
    endless = order * 2
    for position in range(len(order)):
        for block in set(order):
            assert trace.next_use(block, position) == endless.index(block, position + 1)
    assert trace.next_use(99, 0) == math.inf


def test_when_a_block_is_gone_is_known_also_if_the_next_step_loses_it() -> None:
    makes = [Operation("make", makes=((1, 4), (2, 4)), dies=()), Operation("use", (1,), dies=(1,))]
    trace = Trace(makes, {1: 4, 2: 4}, leftovers_end=1)
    assert trace.gone == {1: 1, 2: 3}


def test_spare_memory_that_a_step_needs_stays_and_the_rest_goes() -> None:
    spares: Spares[str, None] = Spares()
    for name in ("a", "b", "c"):
        spares.add(8, name, None)
    spares.end_step()  # they came in this step
    assert spares.bytes == 24
    taken = [spares.take(8), spares.take(8)]
    assert taken == [("c", None), ("b", None)]
    for name in ("b", "c"):
        spares.add(8, name, None)
    spares.end_step()  # two at a time were enough
    assert spares.bytes == 16
    assert spares.take(8) is not None and spares.take(8) is not None and spares.take(8) is None
    assert spares.bytes == 0


def test_spare_memory_of_varying_sizes_does_not_pile_up() -> None:
    spares: Spares[None, None] = Spares()
    for size in range(1, 100):
        assert spares.take(size) is None
        spares.add(size, None, None)
        spares.end_step()
        assert spares.bytes == size
    spares.end_step()
    assert spares.bytes == 0
    spares.clear()
    assert spares.take(99) is None


def run_python(text: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """As a rank with a limit, whose script is this text."""
    package = Path(start.__file__).parents[2]
    own = start.variables(1 << 30, tmp_path, f"{tmp_path}{os.pathsep}{package}")
    return subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


def write_keras(folder: Path, backend: str) -> None:
    """The modules of a Keras with this backend."""
    for each in ("tensorflow", "jax"):
        package = folder / "keras" / "src" / "backend" / each
        package.mkdir(parents=True)
        (package / "core.py").touch()
        for parent in (package, *list(package.parents)[:3]):
            (parent / "__init__.py").touch()
    backends = folder / "keras" / "src" / "backend"
    (backends / "config.py").write_text(f"def backend():\n    return '{backend}'\n")
    (backends / "__init__.py").write_text("from keras.src.backend.config import backend\n")


@pytest.mark.parametrize(("backend", "name"), [("tensorflow", "TensorFlow"), ("jax", "JAX")])
def test_keras_on_another_backend_than_torch_is_refused_in_a_sentence(
    backend: str, name: str, tmp_path: Path
) -> None:
    write_keras(tmp_path, backend)
    done = run_python(f"import keras.src.backend.{backend}.core; print('goes on')", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"carme-run: --memory-per-rank works with PyTorch, and this script runs Keras on its {name} backend. "
        "Set KERAS_BACKEND=torch, or leave --memory-per-rank out.\n"
    )


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_keras_on_torch_may_take_its_data_from_another_framework(backend: str, tmp_path: Path) -> None:
    write_keras(tmp_path, "torch")
    (tmp_path / "torch.py").touch()
    done = run_python(f"import torch, keras.src.backend.{backend}.core; print('goes on')", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")


def test_a_script_that_trains_without_pytorch_is_noted(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").touch()
    done = run_python("import tensorflow; print('goes on')", tmp_path)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert done.stderr.startswith("carme-run: --memory-per-rank limited nothing")


def test_a_keras_model_that_is_to_compute_again_is_refused_before_its_first_step(tmp_path: Path) -> None:
    write_keras(tmp_path, "torch")
    (tmp_path / "torch.py").touch()
    (package := tmp_path / "keras" / "src" / "optimizers").mkdir()
    (package / "__init__.py").touch()
    (package / "base_optimizer.py").write_text(
        "class BaseOptimizer:\n    def apply(self, gradients):\n        print('stepped')\n"
    )
    step = "from keras.src.optimizers.base_optimizer import BaseOptimizer; BaseOptimizer().apply([])"
    done = run_python(step, tmp_path)
    assert (done.returncode, done.stdout) == (0, "stepped\n"), done.stderr
    refuse = "from carme_runtime.out_of_core import keras_scripts; keras_scripts.refuse_training()"
    done = run_python(f"{refuse}; {step}", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "carme-run: --recompute works with layers of PyTorch, and this script trains a model of Keras. "
        "Leave --recompute out.\n"
    )


def test_recomputation_is_refused_where_memory_is_not_limited(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--recompute", __file__])
    assert "Give the limit, too: --memory-per-rank 2G --spill DIR" in capsys.readouterr().err
    options, _ = parse(["--recompute", "--memory-per-rank", "2G", "--spill", "/tmp", __file__])
    assert options.recompute


def test_what_a_site_runs_first_still_runs_in_ranks_with_a_limit(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.site_has_run = True\n")
    done = run_python("print(site_has_run)", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_what_a_site_runs_first_runs_also_where_our_package_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.site_has_run = True\n")
    (tmp_path / "carme_runtime.py").write_text("raise ImportError('of another Python')\n")
    done = run_python("print(site_has_run)", tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_variables_for_ranks_are_texts_and_none_without_a_limit(tmp_path: Path) -> None:
    assert start.variables(None, None, "/own") == {}
    own = start.variables(5, tmp_path, "/own")
    assert start.RECOMPUTE not in own
    assert start.variables(5, tmp_path, None, recompute=True)[start.RECOMPUTE] == "1"
    assert own[start.LIMIT] == "5" and own["PYTHONPATH"].endswith(f"{os.pathsep}/own")


def test_the_kind_of_a_file_system_is_found_also_where_its_source_is_empty_or_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's table is simulated; that this user may not look below a folder, too, as root may."""
    device = tmp_path.stat().st_dev
    table = tmp_path / "mounts"
    monkeypatch.setattr(spill, "_MOUNTS", table)
    start = f"1 0 {os.major(device)}:{os.minor(device)} / / rw -"
    table.write_text(f"{start} ext4  rw\n")
    assert spill.file_system(tmp_path) == "ext4"
    table.write_text(f"{start} overlay  rw,lowerdir=/a,upperdir=/closed/upper,workdir=/b\n")
    is_dir = Path.is_dir

    def refuse(path: Path) -> bool:
        if path.parts[:2] == ("/", "closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert spill.file_system(tmp_path) == "overlay"
