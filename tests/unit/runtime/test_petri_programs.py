"""Programs in other languages as transitions of a net, which share memory by its ranges."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port

import carme_runtime
from carme_runtime.petri import Net, Range, command
from patience import HANG

PROGRAM = """
#include <carme_ranges.h>

/* Adds to each element of the first range the first one of the range called `step`. */
int main(int count, char **words) {
    carme_range values, step, none;
    if (count != 2 || carme_range_open(&values, words[1], 1) || carme_range_open(&step, "step", 0)) return 2;
    if (strcmp(values.dtype, "<f8") || values.dimensions != 2) return 3;
    double *data = (double *)values.data;
    for (size_t i = 0; i < values.shape[0] * values.shape[1]; i++) data[i] += ((const double *)step.data)[0];
    if (!carme_range_open(&none, "none", 0)) return 4;
    fprintf(stderr, "%s\\n", none.error);
    printf("%zu\\n", values.size);
    carme_range_close(&values);
    carme_range_close(&step);
    return 0;
}
"""


@pytest.mark.parametrize(
    ("compiler", "options"), [("gcc", ["-std=c99", "-Wall", "-Werror"]), ("g++", ["-xc++"])]
)
def test_programs_in_c_and_cpp_open_ranges_by_name(
    tmp_path: Path, compiler: str, options: list[str], capsys: pytest.CaptureFixture[str]
):
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    assert command.main(["include"]) == 0
    include = capsys.readouterr().out.strip()
    (tmp_path / "add.c").write_text(PROGRAM)
    build = [compiler, *options, f"-I{include}", "-o", str(tmp_path / "add"), str(tmp_path / "add.c")]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    net = Net("native")
    start, grids = net.place("start", int, tokens=[5]), net.place("grids", Range)
    solved, sizes, sums = net.place("solved", Range), net.place("sizes", int), net.place("sums", list)

    @net.transition(start >> grids)
    def make(value, memory):
        memory.allocate("step", 1, "float64").array()[:] = 0.5
        grid = memory.allocate("grid", (2, 3), "float64")
        grid.array()[:] = value
        return grid

    net.transition([str(tmp_path / "add"), "{grids}"], grids >> solved + sizes, gives=["{grids}", "{stdout}"])
    net.add("read", solved >> sums, lambda grid: grid.array().tolist())
    with net.start(1, folder=tmp_path / "run") as run:
        marking = run.wait(HANG)
    assert marking["sums"] == [[[5.5] * 3] * 2] and marking["sizes"] == [48]
    assert (
        "Range none cannot be opened: no range has this name."
        in (tmp_path / "run" / "output.log").read_text()
    )


# The range is moved when the program has opened its file and has not locked it yet.
MOVED = """
#include <stdlib.h>
#include <sys/file.h>

static int moves;

static int move_and_lock(int file, int how) {
    if (!moves++ && system(getenv("MOVE"))) return -1;
    return flock(file, how);
}
#define flock move_and_lock
#include <carme_ranges.h>

int main(void) {
    carme_range values;
    if (carme_range_open(&values, "values", 1)) return 2;
    printf("%.3s", (char *)values.data);
    return 0;
}
"""


def test_a_program_opens_the_range_that_took_the_place_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed")
    assert command.main(["include"]) == 0
    (tmp_path / "moved.c").write_text(MOVED)
    include = f"-I{capsys.readouterr().out.strip()}"
    subprocess.run(["gcc", include, "-o", "moved", "moved.c"], cwd=tmp_path, check=True)
    for folder in ("memory", "disk"):
        (tmp_path / folder).mkdir()
    (tmp_path / "memory" / "values").write_text("old")
    (tmp_path / "memory" / ".range-values").write_text("{}")
    (tmp_path / "new").write_text("new")
    environment = {
        "PATH": "/usr/bin:/bin",
        "CARME_RANGES": "memory:disk",
        "MOVE": "mv new disk/values && mv memory/.range-values disk/ && rm memory/values",
    }
    done = subprocess.run(
        [str(tmp_path / "moved")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "new")


RANKS = """
#include <carme_ranges.h>
#include <mpi.h>

/* Each rank fills its part of the range. */
int main(int count, char **words) {
    int rank, size;
    carme_range field;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (carme_range_open(&field, words[1], 1)) MPI_Abort(MPI_COMM_WORLD, 1);
    size_t part = field.size / (size_t)size;
    memset((char *)field.data + (size_t)rank * part, rank + 1, part);
    carme_range_close(&field);
    MPI_Barrier(MPI_COMM_WORLD);
    if (!rank) printf("%d\\n", size);
    MPI_Finalize();
    return 0;
}
"""


def test_ranks_of_mpi_share_a_range(tmp_path: Path):
    if not shutil.which("mpicc") or not shutil.which("mpirun"):
        pytest.skip("MPI is not installed")
    include = Path(command.__file__).parent / "include"
    (tmp_path / "ranks.c").write_text(RANKS)
    build = ["mpicc", f"-I{include}", "-o", str(tmp_path / "ranks"), str(tmp_path / "ranks.c")]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    net = Net("ranks")
    fields, filled = net.place("fields", Range), net.place("filled", Range)
    sizes, sums = net.place("sizes", int), net.place("sums", list)
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    options = ["--oversubscribe", "--allow-run-as-root"] if "Open MPI" in version else []
    words = ["mpirun", *options, "-n", "2", str(tmp_path / "ranks"), "{fields}"]
    net.transition(words, fields >> filled + sizes, gives=["{fields}", "{stdout}"], name="fill")
    net.add("read", filled >> sums, lambda field: field.array().tolist())
    with net.start(1, folder=tmp_path / "run") as run:
        field = run.memory.allocate("field", 4)
        run.put(fields, field)
        marking = run.wait(HANG)
    assert marking["sums"] == [[1, 1, 2, 2]] and marking["sizes"] == [2]


GASPI = """
#include <carme_ranges.h>

/* GPI-2's interface, whose header is in no package. */
typedef struct { unsigned logger, sn_port, rest[40]; } configuration;
int gaspi_config_get(configuration *), gaspi_config_set(configuration);
int gaspi_proc_init(unsigned long), gaspi_proc_term(unsigned long);
int gaspi_proc_rank(unsigned short *), gaspi_proc_num(unsigned short *);
int gaspi_segment_bind(unsigned char, void *, unsigned long, int);
int gaspi_segment_register(unsigned char, unsigned short, unsigned long);
int gaspi_write(unsigned char, unsigned long, unsigned short, unsigned char, unsigned long, unsigned long,
                unsigned char, unsigned long);
int gaspi_wait(unsigned char, unsigned long), gaspi_barrier(unsigned char, unsigned long);
static const unsigned long forever = ~0ul;

/* The segment of each rank is its part of the range: its own number, then that of the rank before it. */
int main(int count, char **words) {
    unsigned short rank, size;
    carme_range field;
    configuration settings;
    if (count != 3 || carme_range_open(&field, words[1], 1)) return 2;
    gaspi_config_get(&settings);
    settings.sn_port = (unsigned)atoi(words[2]);
    gaspi_config_set(settings);
    if (gaspi_proc_init(forever) || gaspi_proc_rank(&rank) || gaspi_proc_num(&size)) return 3;
    size_t part = field.size / size;
    unsigned char *own = (unsigned char *)field.data + rank * part;
    own[0] = (unsigned char)(rank + 1);
    if (gaspi_segment_bind(0, own, part, 0)) return 4;
    for (unsigned short other = 0; other < size; other++)
        if (gaspi_segment_register(0, other, forever)) return 5;
    gaspi_barrier(0, forever);
    if (gaspi_write(0, 0, (unsigned short)((rank + 1) % size), 0, 1, 1, 0, forever)) return 6;
    gaspi_wait(0, forever);
    gaspi_barrier(0, forever);
    gaspi_proc_term(forever);
    carme_range_close(&field);
    return 0;
}
"""


def test_segments_of_gpi2_ranks_are_parts_of_a_range(tmp_path: Path):
    """With a library that has GPI-2's interface; `carme-run` starts its ranks."""
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed")
    library, include = tmp_path / "libGPI2.so", Path(command.__file__).parent / "include"
    source = Path(__file__).parents[2] / "simulated_gpi2.c"
    shared = ["gcc", "-shared", "-fPIC", "-O1", "-pthread", "-o", str(library), str(source)]
    subprocess.run(shared, check=True, timeout=HANG)
    (tmp_path / "ranks.c").write_text(GASPI)
    linked = [f"-L{tmp_path}", "-lGPI2", f"-Wl,-rpath,{tmp_path}"]
    build = ["gcc", "-Wall", "-Werror", f"-I{include}", "-o", "ranks", "ranks.c", *linked]
    subprocess.run(build, check=True, timeout=HANG, cwd=tmp_path)
    net = Net("gaspi")
    fields, filled = net.place("fields", Range), net.place("filled", Range)
    values = net.place("values", list)
    runtime = f"PYTHONPATH={Path(carme_runtime.__file__).parents[1]}"
    start = ["env", runtime, sys.executable, "-m", "carme_runtime.launcher.command", "--backend", "gaspi"]
    ranks = ["-n", "3", "--", str(tmp_path / "ranks"), "{fields}", str(free_port())]
    net.transition([*start, *ranks], fields >> filled, gives="{fields}", name="exchange")
    net.add("read", filled >> values, lambda field: field.array().tolist())
    with net.start(1, folder=tmp_path / "run") as run:
        run.put(fields, run.memory.allocate("field", 6))
        marking = run.wait(HANG)
    assert marking["values"] == [[1, 3, 2, 1, 3, 2]]
