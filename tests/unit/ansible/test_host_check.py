"""The checks of nodes, and of their GPUs in a user's jobs, of an installed site."""

import importlib.util
import os
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "ansible/roles/validation/files/check_host.py"
_spec = importlib.util.spec_from_file_location("check_host", PROGRAM)
assert _spec and _spec.loader
check_host = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_host)


def stand_in_for_runuser(folder: Path, monkeypatch: pytest.MonkeyPatch, cases: str) -> None:
    """A program in place of runuser that ends as srun does on a node, by cases of its words."""
    (folder / "runuser").write_text(
        f"#!/bin/sh\ncd {folder}\nclosed=0\n"
        'refuse() { echo "srun: error: Unable to allocate resources: $1" >&2; exit 1; }\n'
        f"case $* in\n{cases}\nesac\necho 0\n"
        'for n in $(seq "$closed"); do echo "sh: cannot open: Operation not permitted"; done\n'
    )
    (folder / "runuser").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def stand_in_for_sinfo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in place of sinfo that prints the file `out` in this folder."""
    (folder / "sinfo").write_text(f"#!/bin/sh\ncat {folder}/out\n")
    (folder / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_nodes_with_different_numbers_of_gpus_are_checked_each_by_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_runuser(
        tmp_path, monkeypatch, "*nodelist=one*) closed=0 ;; *nodelist=four*) closed=3 ;; *) exit 1 ;;"
    )
    assert check_host.gpus("ada", {"one": 1, "four": 4}).endswith("on 2 nodes")
    with pytest.raises(check_host.Wrong, match="on four is kept from 3 of the 1 other"):
        check_host.gpus("ada", {"one": 1, "four": 2})


def test_gpus_of_some_nodes_are_checked_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each waits until as many have begun as may run at the same time; and no more ever run.
    stand_in_for_runuser(
        tmp_path,
        monkeypatch,
        "*) : >begun.$$; : >runs.$$\n"
        f"until [ $(ls begun.* | wc -l) -ge {check_host.GPU_JOBS} ]; do sleep 0.02; done\n"
        f"[ $(ls runs.* | wc -l) -le {check_host.GPU_JOBS} ] || refuse 'too many'; rm runs.$$ ;;",
    )
    nodes = {f"n{number}": 1 for number in range(2 * check_host.GPU_JOBS)}
    assert check_host.gpus("ada", nodes) == f"one GPU visible and all others closed on {len(nodes)} nodes"


def test_nodes_whose_gpus_are_not_checked_are_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_runuser(
        tmp_path,
        monkeypatch,
        "*nodelist=busy*) refuse 'Requested nodes are busy' ;;\n"
        "*nodelist=waits*) echo 'srun: job 7 queued and waiting for resources' >&2; refuse 'Killed' ;;\n"
        # By the second time the user's other jobs are over.
        "*nodelist=limited*) [ -e before ] || { : >before; refuse 'Job violates accounting/QOS policy'; } ;;",
    )
    assert check_host.gpus("ada", {"busy": 1, "free": 1, "waits": 1, "limited": 1}) == (
        "one GPU visible and all others closed on 2 nodes; "
        "not checked, as no GPU was free within 60 s: busy, waits"
    )


def test_nodes_for_which_no_time_is_left_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first is examined for longer than there is time, and no other one beside it.
    stand_in_for_runuser(tmp_path, monkeypatch, "*) sleep 1.5 ;;")
    monkeypatch.setattr(check_host, "GPU_JOBS", 1)
    monkeypatch.setattr(check_host, "GPU_SECONDS", 1.0)
    assert check_host.gpus("ada", {f"n{number}": 1 for number in range(8)}) == (
        "one GPU visible and all others closed on 1 nodes; "
        "not checked, as 1 s were over: n1, n2, n3, n4, n5 and 2 more"
    )


@pytest.mark.parametrize(
    ("nodes", "seconds", "reason"),
    [
        ({"n0": 1, "n1": 1}, 600.0, "no GPU was free within 60 s: n0, n1"),
        ({"n0": 1, "n1": 1}, -1.0, "-1 s were over: n0, n1"),
        ({}, 600.0, "no node at work has GPUs"),
    ],
)
def test_a_check_that_examined_no_node_is_skipped_and_has_not_passed(
    nodes: dict[str, int], seconds: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_runuser(tmp_path, monkeypatch, "*) refuse 'Connection timed out' ;;")
    monkeypatch.setattr(check_host, "GPU_SECONDS", seconds)
    table = [("gpus", lambda: check_host.gpus("ada", nodes), "Look at the nodes.")]
    monkeypatch.setattr(check_host, "checks", lambda _wanted: table)
    [result] = check_host.main({"host": "head"})
    assert result["skipped"] and result["ok"] and not result["remedy"]
    assert result["detail"].endswith(reason) and "closed" not in result["detail"]


@pytest.mark.parametrize(
    "why",
    ["Invalid account", "Job violates accounting/QOS policy", "Socket timed out on send/recv operation"],
)
def test_what_slurm_refuses_a_user_who_is_alone_is_wrong(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_runuser(tmp_path, monkeypatch, f"*) refuse '{why}' ;;")
    with pytest.raises(check_host.Wrong, match=f"on n0: srun: .*{why}"):
        check_host.gpus("ada", {f"n{number}": 1 for number in range(20)})


def test_nodes_that_an_administrator_has_set_aside_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_sinfo(tmp_path, monkeypatch)
    (tmp_path / "out").write_text("n1|idle|none\nn1|idle|none\nn2|mixed-|none\nn3|drained|fan | broken\n")
    assert check_host.nodes(["n1", "n2"]) == "2 nodes at work"
    assert check_host.nodes(["n1", "n2", "n3"]) == "2 nodes at work; n3 is drained (fan | broken)"
    with pytest.raises(check_host.Wrong, match=r"^n3 is drained \(fan \| broken\)\.$"):
        check_host.nodes(["n3"])
    with pytest.raises(check_host.Wrong, match=r"^n4 is unknown; n3 is drained"):
        check_host.nodes(["n1", "n3", "n4"])
    for state in ("drained*", "down", "idle*", "fail", "down~", "planned*"):
        (tmp_path / "out").write_text(f"n1|{state}|Not responding\nn2|idle|none\n")
        with pytest.raises(check_host.Wrong) as caught:
            check_host.nodes(["n1", "n2"])
        assert str(caught.value) == f"n1 is {state}."


def test_nodes_that_backfill_has_planned_or_that_are_asleep_are_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_sinfo(tmp_path, monkeypatch)
    (tmp_path / "out").write_text("n1|planned|none\nn2|idle~|none\nn3|mixed#|none\nn4|drained~|fan\n")
    assert check_host.nodes(["n1"]) == "1 nodes at work"
    assert check_host.nodes(["n1", "n2", "n3", "n4"]) == (
        "3 nodes at work; asleep by power saving: n2, n3; n4 is drained~ (fan)"
    )
    (tmp_path / "out").write_text("n1 gpu:4 planned\nn2 gpu:4 idle~\nn3 gpu:4 down~\n")
    found = check_host.partition_nodes("gpu")
    assert [node["name"] for node in found if node["usable"]] == ["n1", "n2"]
    assert check_host.node_gpus("gpu") == {"n1": 4}, "nobody waits for a node that is switched on first"
