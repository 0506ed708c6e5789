"""ONNX models on two workers: images through OCR networks, bytes that VGG19 sends, time to compile.

    ./test bench onnx --quick
    ./test bench onnx --json result.json

`ocr_200_images_speedup`: detector and recogniser of PP-OCRv4, each for all images, on two workers against
one; each worker has one thread. As a peer, two processes of ONNX Runtime that share the images and have one
thread each, against one such process: the most that these processors give. Each has its sessions before it is
timed, all keep their results, and they take turns.
`ocr_processor_time`: of two workers and of the program that feeds them, over that of ONNX Runtime alone, for
an image. It depends less on what else the machine does, and is what a split costs whatever the processors.
`vgg19_bytes_over_min_cut`: what the plan for two tasks sends, over the fewest bytes of all cuts whose longer
part takes at most 5 % longer than the most balanced one's; and what it sends over what the unfused graph
would. All cuts are tried here, without the planner's code; both use the same measured times.
`vgg19_bytes_over_any_cut`: the same over the fewest bytes of all cuts, however uneven, with the share of the
time that the longer part of that cut takes: 1 means that one worker has nearly nothing to do.
`resnet50_split_speedup`: images that follow one after the other, each when the results of the one before are
there, so that only what is split within the model runs at once: on two workers of one thread against one. The
peer is ONNX Runtime with two threads against one. `vgg19_split_speedup`: the same.
`resnet50_compile_s`: to read, check, fold, measure and plan ResNet-50 for two workers.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
from report import print_table, row, tidy_up_when_ended, write_json

import carme_runtime.onnx as carme_onnx
from carme_runtime.onnx import Runner
from real_models import REAL, folder

#: Aims: at least so many times one worker, and of two independent processes; at most of the cheapest cut's
#: bytes, of the unfused graph's, and seconds.
SPEEDUP, OF_INDEPENDENT, OVER_CUT, OF_UNFUSED, SECONDS = 1.7, 0.95, 1.05, 0.5, 10.0
#: Detector and recogniser, with the shapes of their images.
OCR = (("det_infer", (1, 3, 320, 320)), ("rec_infer", (1, 3, 48, 320)))
#: By how much the longer part may exceed that of the most balanced cut, as docs/users/onnx.md has it.
TOLERANCE = 1.05
#: Images that are not timed where they follow one by one.
WARM_UP = 3


def images(model: Any, shape: tuple[int, ...], count: int) -> list[dict[str, Any]]:
    """Made-up images; what they show does not change what they cost."""
    return [carme_onnx.example_of(model, {"x": shape}, seed=seed) for seed in range(count)]


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def through_net(model: Any, given: list[dict[str, Any]], workers: int) -> float:
    """Seconds per image of ours: the slope between few and all images, which leaves the start out."""
    plan = carme_onnx.plan(carme_onnx.trace(model, given[0]), workers, micro_batches=len(given))
    few = given[: max(len(given) // 10, 2)]
    short = seconds(lambda: Runner(model, workers, compiled=plan, threads=1).run(few))
    long = seconds(lambda: Runner(model, workers, compiled=plan, threads=1).run(given))
    return (long - short) / (len(given) - len(few))


def alone(file: str, given: list[dict[str, Any]], ready: Any, go: Any) -> None:
    """One process of ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    session.run(None, given[0])
    ready.release()
    go.wait()
    results = [session.run(None, each) for each in given]
    assert len(results) == len(given)


def independent(file: str, given: list[dict[str, Any]], count: int) -> float:
    """Seconds per image of so many independent processes."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    processes = [context.Process(target=alone, args=(file, given[k::count], ready, go)) for k in range(count)]
    for each in processes:
        each.start()
    for _ in processes:
        ready.acquire()
    go.set()
    took = seconds(lambda: [each.join() for each in processes])
    return took / len(given)


def alone_ms(file: str, given: list[dict[str, Any]]) -> float:
    """Processor time of ONNX Runtime for an image."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    session.run(None, given[0])
    began = time.process_time()
    results = [session.run(None, each) for each in given]
    return 1000 * (time.process_time() - began) / len(results)


def through_net_ms(model: Any, given: list[dict[str, Any]]) -> tuple[float, float]:
    """Processor time of two workers, and of this program, for an image."""
    first, last = len(given) // 10, len(given) - 1
    marks: dict[int, tuple[float, float]] = {}

    def watch(run: Any, number: int) -> None:
        if number in (first, last):
            stats = [
                Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in run.workers
            ]
            ticks = sum(int(each[11]) + int(each[12]) for each in stats)
            marks[number] = 1000 * ticks / os.sysconf("SC_CLK_TCK"), 1000 * time.process_time()

    plan = carme_onnx.plan(carme_onnx.trace(model, given[0]), 2, micro_batches=len(given))
    Runner(model, 2, compiled=plan, threads=1, watch=watch).run(given)
    workers, program = ((b - a) / (last - first) for a, b in zip(marks[first], marks[last], strict=True))
    return workers, program


def ocr_processor_time(count: int) -> dict[str, Any]:
    """What a split costs."""
    alone = workers = program = 0.0
    for part, shape in OCR:
        real = next(each for each in REAL if part in each.file)
        model = real.load()
        given = images(model, shape, count)
        alone += alone_ms(str(folder() / real.file), given)
        more = through_net_ms(model, given)
        workers, program = workers + more[0], program + more[1]
    parts = {"alone": alone, "workers": workers, "program": program}
    return row("ocr_processor_time", "x", (workers + program) / alone, aim="none", milliseconds=parts)


def ocr(count: int, rounds: int) -> dict[str, Any]:
    """Both networks' times for an image."""
    times: dict[tuple[str, int], list[float]] = {}
    for part, shape in OCR:
        real = next(each for each in REAL if part in each.file)
        model, file = real.load(), str(folder() / real.file)
        given = images(model, shape, count)
        for number in range(rounds):
            for workers in (1, 2):
                measured = times.setdefault(("ours", workers), [0.0] * rounds)
                measured[number] += through_net(model, given, workers)
                reference = times.setdefault(("independent", workers), [0.0] * rounds)
                reference[number] += independent(file, given, workers)
    middle = {key: statistics.median(each) for key, each in times.items()}
    measured = middle["ours", 1] / middle["ours", 2]
    reference = middle["independent", 1] / middle["independent", 2]
    fraction = middle["independent", 2] / middle["ours", 2]
    return row(
        "ocr_200_images_speedup",
        "x",
        measured,
        peers={"two processes": reference},
        aim=f">= {SPEEDUP} of one worker, {OF_INDEPENDENT} of two processes (is {fraction:.2f})",
        holds=measured >= SPEEDUP and fraction >= OF_INDEPENDENT,
        of_independent=fraction,
        milliseconds={f"{who}_{workers}": 1000 * value for (who, workers), value in middle.items()},
    )


def light(name: str) -> Any:
    """The file of a light network."""
    return folder() / next(each.file for each in REAL if each.file.endswith(f"light_{name}.onnx"))


def cuts(graph: Any) -> list[tuple[float, int]]:
    """All cuts into two parts, in the order of operators: the longer one's share, and bytes that cross."""
    times = [each.forward_ms(graph.samples) for each in graph.operators]
    found = []
    for place in range(1, len(times)):
        created = {name for each in graph.operators[:place] for name in each.outputs}
        used = {name for each in graph.operators[place:] for name in each.inputs}
        longer = max(sum(times[:place]), sum(times[place:])) / sum(times)
        if created & used:  # else the parts have nothing to do with each other
            found.append((longer, sum(graph.value[name].bytes for name in created & used)))
    return found


def vgg19() -> list[dict[str, Any]]:
    """Bytes of the plan, over the cheapest cut's."""
    model = carme_onnx.load(light("vgg19"))
    graph = carme_onnx.trace(model, carme_onnx.example_of(model))
    plan = carme_onnx.plan(graph, 2, tasks=2, micro_batches=8)
    found = cuts(graph)
    bound = TOLERANCE * min(found)[0]
    balanced = min(size for longer, size in found if longer <= bound)
    least, uneven = min((size, longer) for longer, size in found)
    ratio, share = plan.sent_bytes / balanced, plan.sent_bytes / plan.unfused_bytes
    aim = f"<= {OVER_CUT}, and <= {OF_UNFUSED} of the unfused (is {share:.3f})"
    holds = ratio <= OVER_CUT and share <= OF_UNFUSED
    sizes = {"bytes": plan.sent_bytes, "balanced_bytes": balanced, "least_bytes": least}
    any_cut = plan.sent_bytes / least
    return [
        row("vgg19_bytes_over_min_cut", "x", ratio, aim=aim, holds=holds, of_unfused=share, **sizes),
        row(
            "vgg19_bytes_over_any_cut",
            "x",
            any_cut,
            aim=f"none: its longer part has {uneven:.3f}",
            longer=uneven,
        ),
    ]


def resnet50() -> dict[str, Any]:
    """Seconds to compile it."""

    def compiled() -> None:
        model = carme_onnx.load(light("resnet50"))
        carme_onnx.plan(carme_onnx.trace(model, carme_onnx.example_of(model)), 2)

    took = seconds(compiled)
    return row("resnet50_compile_s", "s", took, aim=f"< {SECONDS}", holds=took < SECONDS)


def one_by_one(model: Any, given: list[dict[str, Any]], workers: int) -> tuple[float, int]:
    """Seconds of an image that is alone in the net, and how many groups of operators are split."""
    plan = carme_onnx.plan(carme_onnx.trace(model, given[0]), workers, micro_batches=1, model=model)
    ended: list[float] = []

    def watch(run: Any, number: int) -> None:
        run.wait()
        ended.append(time.perf_counter())

    Runner(model, workers, compiled=plan, threads=1, watch=watch).run(given)
    took = statistics.median(b - a for a, b in itertools.pairwise(ended[WARM_UP:]))
    return took, len(plan.splits)


def with_threads(file: str, given: list[dict[str, Any]], threads: int) -> float:
    """Seconds of an image in ONNX Runtime alone."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return statistics.median([seconds(lambda each=each: session.run(None, each)) for each in given][WARM_UP:])


def split_speedup(name: str, count: int, rounds: int) -> dict[str, Any]:
    """One image on two workers against one."""
    model, file = carme_onnx.load(light(name)), str(light(name))
    given = [carme_onnx.example_of(model, seed=seed) for seed in range(count)]
    times: dict[str, list[float]] = {"ours_1": [], "ours_2": [], "threads_1": [], "threads_2": []}
    splits = 0
    for _ in range(rounds):
        for workers in (1, 2):
            took, splits = one_by_one(model, given, workers)
            times[f"ours_{workers}"].append(took)
            times[f"threads_{workers}"].append(with_threads(file, given, workers))
    middle = {key: 1000 * statistics.median(each) for key, each in times.items()}
    peer = {"two threads": middle["threads_1"] / middle["threads_2"]}
    measured = middle["ours_1"] / middle["ours_2"]
    return row(
        f"{name}_split_speedup", "x", measured, peers=peer, aim="none", milliseconds=middle, splits=splits
    )


def main() -> int:
    """Measure; 1: an aim is missed."""
    parser = argparse.ArgumentParser(description="How quick ONNX models are on several workers.")
    parser.add_argument("--quick", action="store_true", help="20 images, one round")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args()
    tidy_up_when_ended()
    count = 20 if options.quick else 200
    rounds = 1 if options.quick else 5
    rows = [resnet50(), *vgg19(), ocr_processor_time(count), ocr(count, rounds)]
    rows += [split_speedup(name, 10, rounds) for name in ("resnet50", "vgg19")]
    print_table(rows)
    if options.json:
        write_json(options.json, rows)
    return 0 if all(each["holds"] is not False for each in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
