"""What each benchmark of `./test bench` needs, and how it is started."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from suites import debian
from suites.demo_hosts import DemoHosts
from suites.environments import prepare_horovod, prepare_models, prepare_native, prepare_petri
from suites.running import Runner, Stop, path_of, show_stage

__all__ = ["BENCHMARKS", "Benchmark", "run_benchmark"]


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark is run.

    Attributes:
        path: Folders of the tree that it imports from.
        interpreter: `tests`, `native` (with PyTorch and the built core) or `petri`.
        prepare: What is prepared before.
        has_models: Whether it gets the folder of real ONNX models.
        on_demo: Whether it runs on the demo cluster.
        needs_root: Whether it starts hosts or changes control groups.
        script: The name of its file; empty: its own name.
    """

    path: tuple[str, ...] = ()
    interpreter: str = "tests"
    prepare: tuple[Callable[[], object], ...] = ()
    has_models: bool = False
    on_demo: bool = False
    needs_root: bool = False
    script: str = ""


def _compared_copies() -> None:
    """What copying data is compared with."""
    if not all(shutil.which(program) for program in ("rsync", "fpsync", "fio")):
        show_stage("Installing what it is compared with")
        debian.apt_install("rsync", "fpart", "fio")


def _postgresql() -> None:
    if not debian.prepare_postgresql():
        raise Stop("This benchmark needs PostgreSQL.")


def _compiler() -> None:
    if not debian.prepare_compiler():
        raise Stop("This benchmark needs a C compiler.")


_NATIVE = Benchmark(interpreter="native")
_ON_DEMO = Benchmark(path=("tests", "carme/src", "ansible/demo"), on_demo=True, needs_root=True)
_PORTAL = ("tests", "carme/src", "webui/src")
BENCHMARKS = {
    **dict.fromkeys(("allreduce", "compare", "onnx_training", "pipeline", "traces", "training"), _NATIVE),
    "scaling": Benchmark(("tests",), "native"),
    "out_of_core": Benchmark(("tests",), "native", needs_root=True),
    "petri": Benchmark(("tests", "containers/runtime/src"), "petri"),
    "onnx": Benchmark(("tests", "containers/runtime/src"), has_models=True, script="onnx_speed"),
    "onnx_nodes": Benchmark(
        ("tests", "carme/src", "ansible/demo", "containers/runtime/src"),
        has_models=True,
        on_demo=True,
        needs_root=True,
    ),
    "staging": Benchmark(prepare=(_compared_copies,)),
    "portal": Benchmark(_PORTAL, prepare=(_postgresql, debian.prepare_redis)),
    "exporter": Benchmark(
        ("tests", "carme/src", "monitoring/src", "ansible/demo"),
        prepare=(_compiler, debian.prepare_node_exporter),
        needs_root=True,
    ),
    "scale": Benchmark(
        (*_PORTAL, "monitoring/src"),
        prepare=(_postgresql, debian.prepare_redis, debian.prepare_prometheus),
    ),
    "cluster_snapshot": Benchmark(("tests", "carme/src", "monitoring/src")),
    "first_model": Benchmark(
        _ON_DEMO.path, prepare=(debian.prepare_chromium,), on_demo=True, needs_root=True
    ),
    "session_start": _ON_DEMO,
    "slurm_load": _ON_DEMO,
}
#: Those that are compared with Horovod itself.
WITH_HOROVOD = {"compare", "pipeline"}


def run_benchmark(
    runner: Runner, hosts: DemoHosts, tests: Path, name: str, arguments: tuple[str, ...]
) -> None:
    """Prepare and run a benchmark.

    Args:
        runner: Runs it, and notes how it ended.
        hosts: The demo's hosts.
        tests: The interpreter of the tests' environment.
        name: The benchmark.
        arguments: Its arguments.

    Raises:
        Stop: What it needs is missing.
    """
    benchmark = BENCHMARKS[name]
    for prepare in benchmark.prepare:
        prepare()
    environment = path_of(*benchmark.path) if benchmark.path else {}
    if benchmark.has_models:
        environment["CARME_MODELS"] = str(prepare_models(tests))
    python = tests
    if benchmark.interpreter == "native":
        native = prepare_native(tests)
        if name in WITH_HOROVOD:
            prepare_horovod(native)
        python = native / "bin/python"
    elif benchmark.interpreter == "petri":
        python = prepare_petri(tests)
    if benchmark.on_demo:
        hosts.bring_up("bench")
    script = f"tests/benchmarks/{benchmark.script or name}.py"
    runner.run(f"bench {name}", python, script, *arguments, environment=environment)
