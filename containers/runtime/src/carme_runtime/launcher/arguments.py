"""The arguments of `carme-run`: its options, and the program that they are followed by."""

import argparse
import difflib
import importlib.machinery
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from carme_runtime import __version__, logs, strategies
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.launcher import backends
from carme_runtime.out_of_core.sizes import parse_size
from carme_runtime.scaling import start as scaling
from carme_runtime.traces import launch as tracing
from carme_runtime.transports import TORCH_BACKENDS, TRANSPORTS

# By Tarantella's launcher, today's and the older one's.
ALIASES = {
    "--n-per-node": "--devices-per-node", "-ngpuspernode": "--devices-per-node", "--no-gpus": "--no-gpu",
    "--pin-to-socket": "--pin-cpus", "--pin-memory-to-socket": "--pin-memory",
}  # fmt: skip
# What is so without being requested.
NEEDLESS = ("--log-on-all-devices",)
OPTIONS_WITH_VALUE = (
    "-n", "--nodes", "--devices-per-node", "--devices-per-rank", "--hostfile", "-x", "--output",
    "--log-folder", "--hang-seconds", "--max-restarts", "--min-ranks", "--max-ranks", "--backend",
    "--torch-backend", "--transport", "--profile", "--log-level", "--fusion-threshold",
    "--python-interpreter", "--memory-per-rank", "--spill", "--strategy", "--onnx", "--shared-folder",
    *scaling.OPTIONS_WITH_VALUE, *tracing.OPTIONS_WITH_VALUE,
)  # fmt: skip
# Behind a script they are the script's, as with torchrun; few scripts have options of these names.
MOSTLY_OURS = (
    "-n", "--nodes", "--devices-per-node", "--devices-per-rank", "--hostfile", "--no-gpu", "--pin-cpus",
    "--pin-memory", "--max-restarts", "--min-ranks", "--max-ranks", "--hang-seconds", "--fusion-threshold",
    "--python-interpreter", "--dry-run", "--n-per-node", "--memory-per-rank",
)  # fmt: skip
_ALSO_CALLED = {"pytorch": "torch", "ddp": "torch", "tf": "tensorflow", "openmpi": "mpi", "gpi2": "gaspi"}
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")


def parser() -> argparse.ArgumentParser:
    """What understands the options of `carme-run`; its manual page is made from it, too."""
    parser = argparse.ArgumentParser(
        prog="carme-run",
        allow_abbrev=False,
        description="Start a program once per GPU on all nodes of this job, as torchrun does on one; "
        "outside of jobs, on this host.",
        usage="carme-run [options] script.py [argument ...]\n"
        "       carme-run [options] -m module [argument ...]\n"
        "       carme-run [options] -- program [argument ...]",
    )
    _add_place_options(parser)
    _add_output_options(parser)
    _add_restart_options(parser)
    _add_library_options(parser)
    _add_observation_options(parser)
    _add_training_options(parser)
    _add_action_options(parser)
    return parser


def _add_place_options(parser: argparse.ArgumentParser) -> None:
    """Where ranks run, and what each of them has there."""
    parser.add_argument("-n", type=_count, metavar="N", help="number of ranks (default: as many as fit)")
    parser.add_argument("--nodes", type=_count, metavar="M", help="use the first M nodes (default: all)")
    parser.add_argument(
        "--devices-per-node",
        type=_count,
        metavar="K",
        help="ranks per node (default: one per GPU that the job has on the node, or one without GPUs)",
    )
    parser.add_argument(
        "--devices-per-rank",
        type=_count,
        metavar="D",
        help="GPUs of its own that each rank sees (default: each rank sees all GPUs of its node)",
    )
    parser.add_argument(
        "--no-gpu",
        action="store_true",
        help="hide the GPUs from the ranks, and start as many as on nodes without GPUs",
    )
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="use these nodes of the job in this order; a line is 'host', 'host slots=4' or 'host:4'",
    )
    parser.add_argument(
        "--shared-folder",
        type=Path,
        metavar="DIR",
        help="in a Slurm job without Carme: a folder that all its nodes see, for this run's key "
        "(default: ~/.carme)",
    )
    parser.add_argument(
        "--unencrypted",
        action="store_true",
        help="in a Slurm job without Carme: do not encrypt the traffic between carme-run's nodes",
    )
    parser.add_argument("--pin-cpus", action="store_true", help="bind each rank to CPU cores of its own")
    parser.add_argument(
        "--pin-memory",
        action="store_true",
        help="as --pin-cpus, and bind each rank to the memory of its cores' NUMA nodes",
    )
    parser.add_argument(
        "-x",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for all ranks",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    """What becomes of the ranks' output, and of calls that hang."""
    parser.add_argument(
        "--output",
        choices=("all", "master"),
        default="all",
        help="show the output of all ranks, or of rank 0 (default: all)",
    )
    parser.add_argument(
        "--output-on-all-devices",
        action="store_true",
        help="with carme_runtime.keras, every rank prints what fit, evaluate, predict, summary and callbacks "
        "report (default: rank 0 alone)",
    )
    parser.add_argument(
        "--log-folder", type=Path, metavar="DIR", help="also write the output of rank N to DIR/rank-N.log"
    )
    parser.add_argument(
        "--hang-seconds",
        type=_seconds,
        metavar="S",
        help="print the ranks' stacks when a call has waited for S seconds (default: 300; 0: never)",
    )


def _add_restart_options(parser: argparse.ArgumentParser) -> None:
    """What happens when ranks or nodes are lost."""
    parser.add_argument(
        "--max-restarts",
        type=_number,
        default=0,
        metavar="R",
        help="restart the run up to R times when ranks or nodes are lost; the script resumes from its last "
        "checkpoint (default: 0)",
    )
    parser.add_argument(
        "--min-ranks", type=_count, metavar="N", help="end the run when fewer ranks are left (default: 1)"
    )
    parser.add_argument(
        "--max-ranks",
        type=_count,
        metavar="N",
        help="use nodes that join or return, for up to N ranks (default: as many as at the start)",
    )


def _add_library_options(parser: argparse.ArgumentParser) -> None:
    """The framework, and what carries its data."""
    parser.add_argument(
        "--backend",
        type=_backend,
        choices=tuple(backends.BACKENDS),
        help="the framework of the script (default: torch); --dry-run shows what it sets, starts and stops",
    )
    parser.add_argument(
        "--torch-backend",
        choices=TORCH_BACKENDS,
        help="the backend of torch.distributed in PyTorch scripts, in place of the one that they or their "
        "library name",
    )
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        help="what carries the data of carme_runtime: its own core, or the installed GPI-2",
    )


def _add_observation_options(parser: argparse.ArgumentParser) -> None:
    """What is recorded and logged of a run."""
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="report at the end where the ranks' time went, and write a trace of each to DIR/rank-N.json",
    )
    tracing.add_options(parser)
    parser.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        help="how much carme_runtime logs on each rank's standard error (default: WARNING); INFO and DEBUG "
        "also log where ranks run",
    )


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    """How PyTorch and Keras train."""
    parser.add_argument(
        "--fusion-threshold",
        type=_number,
        metavar="KIB",
        help="size of the buckets in which Keras and parallelize reduce gradients together; 0: each gradient "
        "by itself (default: 8192, between nodes with PyTorch 1024)",
    )
    parser.add_argument(
        "--memory-per-rank",
        type=_size,
        metavar="SIZE",
        help="train PyTorch models in this much memory, such as 2G; tensors that do not fit go to --spill",
    )
    parser.add_argument(
        "--spill", type=Path, metavar="DIR", help="with --memory-per-rank: a folder on a disk of each node"
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="with --memory-per-rank: compute forward passes of consecutive PyTorch layers again in the "
        "backward pass, where moving their activations to the disk and back takes longer",
    )
    parser.add_argument(
        "--strategy",
        choices=strategies.STRATEGIES,
        help="how the ranks of a script that calls pipeline(), or of a Keras script, share its model "
        "(default: the script's choice, else auto: the fastest that fits into memory, by prediction)",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print the plan of a script that calls pipeline(), or of a Keras script; train nothing",
    )
    scaling.add_options(parser)


def _add_action_options(parser: argparse.ArgumentParser) -> None:
    """What is run, or done instead."""
    parser.add_argument(
        "--python-interpreter",
        type=_words,
        metavar="PATH",
        help="the interpreter that runs the script (default: this Python); empty: none, the script is a "
        "program itself",
    )
    parser.add_argument(
        "--cleanup",
        action="store_true",
        help="run nothing; end processes that earlier runs left on the nodes: those that left their rank's "
        "process group, or whose agent was killed; with a script only those that name it",
    )
    parser.add_argument(
        "--onnx",
        metavar="MODEL",
        help="as the first option: run an ONNX model on several workers; carme-run --onnx --help lists "
        "its options",
    )
    parser.add_argument("--force", action="store_true", help="with --cleanup: kill these processes")
    parser.add_argument(
        "--dry-run", action="store_true", help="show where ranks would run, and start nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="with --dry-run: in JSON, with each rank's environment"
    )
    parser.add_argument("--version", action="version", version=__version__)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    known = parser()
    arguments = _from_tarantella(arguments)
    own = _own_options(arguments)
    options = known.parse_args(arguments[:own])
    if options.onnx:
        known.error(
            "--onnx stands first, and options of scripts do not go with it. See: carme-run --onnx --help"
        )
    if options.force and not options.cleanup:
        known.error("--force says how --cleanup ends processes. Add --cleanup, or leave --force out")
    if options.json and (options.cleanup or not options.dry_run):
        known.error("--json is how --dry-run says where ranks would run. Add --dry-run, or leave --json out")
    if options.cleanup:
        named = [word for word in arguments[own:] if word not in ("-m", "--")]
        return options, named[:1] or [""]
    if own == len(arguments):
        known.error("Nothing to run was named. Give a script: carme-run train.py")
    if (options.min_ranks or options.max_ranks) and not options.max_restarts:
        known.error("--min-ranks and --max-ranks need runs that may start anew. Add --max-restarts 3")
    if options.no_gpu and options.devices_per_rank:
        known.error("--no-gpu and --devices-per-rank exclude each other. Leave one of them out")
    if (options.memory_per_rank is None) != (options.spill is None):
        known.error(
            "--memory-per-rank and --spill belong together. Give both: --memory-per-rank 2G --spill DIR"
        )
    if options.plan and options.scale_probe:
        known.error("--plan trains nothing, so --scale-probe has no steps to measure. Leave one of them out")
    if options.recompute and options.spill is None:
        known.error(
            "--recompute says what to do where memory is limited. Give the limit, too: --memory-per-rank 2G "
            "--spill DIR"
        )
    if options.backend not in (None, "torch") and options.max_restarts:
        known.error(
            f"A run with --backend {options.backend} cannot start anew with other ranks. "
            "Use --max-restarts without --backend"
        )
    _check_backend(known, options)
    interpreter = options.python_interpreter
    if interpreter:
        interpreter[0] = _program(interpreter[0])
    _note_options_behind(arguments, own)
    return options, _command(arguments[own], arguments[own + 1 :], interpreter)


def _note_options_behind(arguments: list[str], own: int) -> None:
    """Say of options of ours behind the script that the script gets them.

    Who writes `--` in front of the script, or the same option there, knows.
    """
    module = arguments[own] == "-m"
    behind = arguments[own + 1 + module :]
    if arguments[own] == "--" or "--" in behind:
        return
    for word in behind:
        option = word.partition("=")[0]
        if option in MOSTLY_OURS and option not in arguments[:own]:
            name = arguments[own + module]
            print(
                f"carme-run: {word} behind {name} is {name}'s. Options of carme-run stand before it; "
                f"if it is as you want it, write: carme-run -- {'python -m ' * module}{name} ...",
                file=sys.stderr,
                flush=True,
            )
            return


def _check_backend(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a sentence where other options do not go with the backend."""
    name = options.backend
    if name == "mpi":
        _check_mpi(parser, options)
    if name == "horovod" and options.hang_seconds is not None:
        parser.error(
            "--hang-seconds is for the runtime's own collectives, not for Horovod's. Set Horovod's limit "
            "instead: -x HOROVOD_STALL_CHECK_TIME_SECONDS=60"
        )
    if name == "horovod" and options.fusion_threshold is not None:
        parser.error(
            "--fusion-threshold is for the runtime's own front ends, not for Horovod. Set Horovod's instead, "
            "in bytes: -x HOROVOD_FUSION_THRESHOLD=67108864"
        )
    if name and backends.BACKENDS[name].driver:
        _check_driver(parser, options)
    if name and not backends.BACKENDS[name].torch:
        for option, value in (
            ("--torch-backend", options.torch_backend),
            ("--memory-per-rank", options.memory_per_rank),
        ):
            if value:
                parser.error(
                    f"{option} is for scripts of PyTorch, and --backend {name} is for others. Leave one of "
                    "the two out"
                )
    if name and not backends.BACKENDS[name].runtime:
        _check_runtime(parser, options)


def _check_driver(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Where the script runs once, nothing is bound, and Ray's own tasks say what they need of GPUs."""
    for option, value in (("--pin-cpus", options.pin_cpus), ("--pin-memory", options.pin_memory)):
        if value:
            parser.error(
                f"{option} binds ranks, and --backend {options.backend} starts no ranks but the script once, "
                f"beside workers of its own. Leave {option} out"
            )
    if options.backend == "ray" and options.devices_per_rank:
        parser.error(
            "--devices-per-rank is for ranks, and Ray's tasks say themselves how many GPUs each needs. Leave "
            "it out, and write @ray.remote(num_gpus=1)"
        )


def _check_runtime(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What a script does with carme_runtime that trains otherwise: nothing."""
    for option, value in (
        # What a probe predicts depends on it, whatever the framework.
        ("--fusion-threshold", None if options.scale_probe else options.fusion_threshold),
        ("--hang-seconds", options.hang_seconds),
        ("--strategy", options.strategy),
        ("--transport", options.transport),
        ("--output-on-all-devices", options.output_on_all_devices or None),
    ):
        if value is not None:
            parser.error(
                f"{option} is for scripts that train over carme_runtime, and --backend {options.backend} is "
                "for others. Leave one of the two out"
            )
    if options.plan:
        parser.error(
            "--plan is for models that PyTorch's pipeline() or carme_runtime.keras trains, and --backend "
            f"{options.backend} is for others. To plan such a script, leave --backend out; to see what this "
            "one would start, use --dry-run"
        )


def _check_mpi(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """mpirun starts the ranks and shows what they say: what carme-run does with both is not to be had."""
    for name, value in (
        ("--pin-cpus", options.pin_cpus),
        ("--pin-memory", options.pin_memory),
        ("--no-gpu", options.no_gpu),
        ("--log-folder", options.log_folder),
        ("--output master", options.output == "master"),
        ("--profile", options.profile),
        ("--trace", options.trace),
        ("--devices-per-rank", options.devices_per_rank),
    ):
        if value:
            parser.error(f"{name} does not go with --backend mpi. Use the variables of your MPI instead")


def _from_tarantella(arguments: list[str]) -> list[str]:
    """Tarantella's options in this command's words."""
    arguments = _with_flag_per_variable(arguments)
    count = _own_options(arguments)
    own, rest = arguments[:count], arguments[count:]
    if rest[:1] == ["-m"] and _names_hosts(own, rest[1:]):
        return [*_from_tarantella(own), "--hostfile", *rest[1:2], *_from_tarantella(rest[2:])]
    for alias, option in ALIASES.items():
        own = [option + word[len(alias) :] if word.partition("=")[0] == alias else word for word in own]
    return [word for word in own if word not in NEEDLESS] + rest


def _names_hosts(before: list[str], rest: list[str]) -> bool:
    """Whether -m is the older launcher's, which names a file of hosts; options may follow it.

    `-ngpuspernode` is that launcher's, too. Behind the name it may be a module's, if there is no such file.
    """
    after = rest[1 : 1 + _own_options(rest[1:])]
    return "-ngpuspernode" in before or ("-ngpuspernode" in after and Path(rest[0]).is_file())


def _own_options(arguments: list[str]) -> int:
    """How many of the arguments are carme-run's own: what follows belongs to the program."""
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if argument in ("-m", "--") or not argument.startswith("-"):
            return index
        index += 2 if ALIASES.get(argument, argument) in OPTIONS_WITH_VALUE else 1
    return len(arguments)


def _with_flag_per_variable(arguments: list[str]) -> list[str]:
    """With -x before each variable: Tarantella's launcher takes several after one, and then --."""
    index = _own_options(arguments)
    while (
        index >= 2 and arguments[index - 2] == "-x" and _VARIABLE.match("".join(arguments[index : index + 1]))
    ):
        if "--" not in arguments[index:]:
            break  # a program, of whatever name
        arguments = [*arguments[:index], "-x", *arguments[index:]]
        index = _own_options(arguments)
    return arguments


def _program(name: str) -> str:
    found = shutil.which(name)
    if not found:
        raise CarmeRuntimeError(
            f"There is no program '{name}' that can be executed.", "Check its name, its mode and PATH."
        )
    return str(Path(found).absolute())


def _command(first: str, rest: list[str], interpreter: list[str] | None = None) -> list[str]:
    """What each rank executes; `interpreter`: what to use instead of this Python, empty: nothing."""
    python = [sys.executable] if interpreter is None else interpreter
    if first == "--":
        if not rest:
            raise CarmeRuntimeError("No program follows --.", "Give one: carme-run -- program argument ...")
        is_script = rest[0].endswith(".py") and not shutil.which(rest[0])
        if interpreter is not None or is_script:
            return _command(rest[0], rest[1:], interpreter)
        return [_program(rest[0]), *rest[1:]]
    if first == "-m":
        if not rest:
            raise CarmeRuntimeError("No module follows -m.", "Give one: carme-run -m package.module")
        if not python:
            raise CarmeRuntimeError(
                "Modules are run by a Python, and --python-interpreter names none.", "Leave it out."
            )
        if interpreter is None:  # another one may find what this one does not
            _check_module(rest[0])
        return [*python, "-m", *rest]
    _check_script(first)
    if not python:
        return [_program(first if "/" in first else f"./{first}"), *rest]
    return [*python, first, *rest]


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise CarmeRuntimeError(f"'{script}' is a folder, not a script.", "Name a Python file in it.")
    if not path.exists():
        raise CarmeRuntimeError(
            f"There is no script '{script}' in {Path.cwd()}." if not path.is_absolute()
            else f"There is no script '{script}'.",
            "Check the name and the folder.",
        )  # fmt: skip
    if not os.access(path, os.R_OK):
        raise CarmeRuntimeError(f"The script '{script}' may not be read by you.", f"Use: chmod u+r {script}")


def _check_module(module: str) -> None:
    package = module.partition(".")[0]
    finder = importlib.machinery.PathFinder
    if package not in sys.builtin_module_names and not finder.find_spec(
        package, [str(Path.cwd()), *sys.path]
    ):
        raise CarmeRuntimeError(
            f"There is no module '{package}' for {sys.executable}.",
            "Install it, or go to the folder that has it.",
        )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of 1 or more.")
    return int(text)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of 0 or more.")
    return int(text)


def _backend(text: str) -> str:
    """A backend's name. Raises ArgumentTypeError with the one that was meant, where that can be seen."""
    if text in backends.BACKENDS:
        return text
    name, unknown = text.lower(), f"'{text}' is no framework that carme-run knows."
    near = difflib.get_close_matches(name, backends.BACKENDS, 1)
    if name in TORCH_BACKENDS:
        hint = f"It is a backend of PyTorch's: --torch-backend {name}"
    elif name == "keras":
        hint = "Scripts of carme_runtime.keras need no --backend, and those of tf_keras --backend tensorflow"
    elif meant := _ALSO_CALLED.get(name, near[0] if near else ""):
        hint = f"Did you mean --backend {meant}?"
    else:
        hint = f"Give one of: {', '.join(backends.BACKENDS)}"
    raise argparse.ArgumentTypeError(f"{unknown} {hint}")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except CarmeRuntimeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not a command: {error}.") from None


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals and name in os.environ:
        value = os.environ[name]
    elif not equals or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE, nor a variable that is set here.")
    return name, value


def _seconds(text: str) -> str:
    try:
        good = 0 <= float(text) < float("inf")
    except ValueError:
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"'{text}' is not a valid number of seconds.")
    return text
