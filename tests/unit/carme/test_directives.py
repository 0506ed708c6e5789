"""`#SBATCH` lines, read as sbatch(1) says."""

from typing import Any

import pytest

from carme.errors import InvalidRequest
from carme.jobs import parse_minutes
from carme.jobs.directives import directives


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-t 90", {"time": 90}),
        ("-t 1:30", {"time": 2}),
        ("--time 02:00:00", {"time": 120}),
        ("--time=1-2", {"time": 26 * 60}),
        ("--time=1-2:30", {"time": 26 * 60 + 30}),
        ("--time=1-00:00:01", {"time": 1441}),
        ("-N2 --ntasks-per-node=4 -c2", {"nodes": 2, "cpus": 8}),
        ("-N 2 -n 5", {"nodes": 2, "cpus": 3}),
        ("-c 8 --mem-per-cpu=2G", {"cpus": 8, "memory": 16384}),
        ("--mem=1500", {"memory": 1500}),
        ("--mem 1T", {"memory": 1 << 20}),
        ("--gres=gpu", {"gpus": 1}),
        ("--gres=lscratch:10,gpu:v100", {"gpus": 1, "gpu_type": "v100"}),
        ("--gpus=a100:4 -N2", {"nodes": 2, "gpus": 2, "gpu_type": "a100"}),
        ("--ntasks=2 --gpus-per-task=1", {"cpus": 2, "gpus": 2}),
        ("-p gpu -A lab --reservation=r1 --array=0-9%2 --chdir=/x", {
            "partition": "gpu", "account": "lab", "reservation": "r1", "array": "0-9%2", "workdir": "/x",
        }),
        ("--job-name='two words'", {"name": "two words"}),
        ("", {}),
    ],
)  # fmt: skip
def test_sbatch_options_become_the_fields_of_a_request(options: str, expected: dict[str, Any]) -> None:
    found = directives(f"#!/bin/sh\n#SBATCH {options}\nsleep 1\n#SBATCH --bad\n")
    if "time" in expected:
        found.options["time"] = parse_minutes(found.options["time"])
    assert found.options == expected and not found.ignored


def test_what_is_ignored_is_named() -> None:
    text = "#SBATCH -o x --mail-type=END --mail-user a@b.c --export=NONE\n#SBATCH --time=UNLIMITED --mem=0\n"
    assert directives(text).ignored == [
        "-o",
        "--mail-type",
        "--mail-user",
        "--mem=0",
        "--time without a limit",
    ]


@pytest.mark.parametrize(
    "options",
    [
        *("--nodes=many", "--time=soon", "--mem=lots", "--gpus=a:b", "--name 'x", "-N0", "-n" + "9" * 400),
        *("--mem=" + "9" * 4299, "--gpus=a:" + "9" * 4299, "--time=" + "9" * 4299),
    ],
)
def test_what_is_wrong_is_named_with_its_line(options: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        directives(f"#!/bin/sh\n#SBATCH {options}\n")
    assert f"Line 2 of the script, {f'#SBATCH {options}'[:80]!r}, cannot be understood: " in str(caught.value)


@pytest.mark.parametrize("word", ["hetjob", "packjob"])
def test_the_components_of_a_heterogeneous_job_are_not_taken_for_one(word: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        directives(f"#!/bin/sh\n#SBATCH --gpus=1\n#SBATCH {word}\n#SBATCH --gpus=4\n")
    message = f"Line 3 of the script, '#SBATCH {word}', begins another component of a heterogeneous job"
    assert message in caught.value.message and "with sbatch" in caught.value.remedy
