"""carme-run in a job of two nodes: where ranks run, what they get, what comes back."""

import ast
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from carme_runtime.launcher.help import HELP, Section
from patience import HANG

from .conftest import MEET, Job, Process, Witness

Script = Callable[[str], str]
SHOW = "import os, sys; print(dict(os.environ), sys.argv[1:], os.getcwd(), sep='|')"


def shown(output: str) -> dict[int, tuple[dict[str, str], list[str], str]]:
    """By rank, what SHOW printed."""
    found = {}
    for line in output.splitlines():
        label, _, rest = line.partition("] ")
        environment, arguments, folder = rest.split("|")
        found[int(label.removeprefix("[rank "))] = (
            ast.literal_eval(environment), ast.literal_eval(arguments), folder
        )  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-n", "2", "--", "sh", "-c", "echo wrong >&2; exit 3"], "Its last error output:\nwrong"),
        (["nothing.py"], "There is no script 'nothing.py'"),
    ],
)
def test_a_failure_names_the_page_that_says_more(job: Job, arguments: list[str], reason: str) -> None:
    code, _, errors = job.launch(*arguments, environment={HELP: "https://a.example/help/"}).wait()
    assert code
    message = errors.partition("carme-run: ")[2]
    assert reason in message
    assert message.endswith(f"\nMore: https://a.example/help/training/#{Section.FAILURE}\n")


def test_each_page_that_says_more_exists() -> None:
    guide = (Path(__file__).parents[3] / "docs/users/training.md").read_text()
    headings = re.findall(r"^## (.*)$", guide, re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert {str(section) for section in Section} <= anchors


@pytest.mark.parametrize("node", [0, 1])
def test_ranks_are_spread_over_both_nodes_in_blocks(job: Job, script: Script, node: int) -> None:
    code, out, errors = job.launch("-n", "4", script(SHOW), node=node, environment={"CALLER": "me"}).wait()
    assert (code, errors) == (0, "")
    ranks = shown(out)
    assert sorted(ranks) == [0, 1, 2, 3]
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"]
    reported = [[ranks[rank][0][name] for name in (*names, "SLURMD_NODENAME")] for rank in range(4)]
    assert reported == [
        ["0", "4", "0", "2", "0", "0", "n1"],
        ["1", "4", "1", "2", "0", "0", "n1"],
        ["2", "4", "0", "2", "1", "1", "n2"],
        ["3", "4", "1", "2", "1", "1", "n2"],
    ]
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank, (environment, _, folder) in ranks.items():
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["MASTER_PORT"] == ranks[0][0]["MASTER_PORT"]
        assert environment["OMP_NUM_THREADS"] == str(threads)
        assert environment["GLOO_SOCKET_IFNAME"] == "lo"
        assert environment["PYTHONUNBUFFERED"] == "1"
        assert environment["CALLER"] == "me"
        assert environment["CARME_AGENT"] == str(job.socket(rank // 2))
        assert folder == str(job.folder)


def test_one_rank_per_node_is_the_default_without_gpus(job: Job, script: Script) -> None:
    code, out, _ = job.launch(script(SHOW), environment={"OMP_NUM_THREADS": "7"}).wait()
    ranks = shown(out)
    assert code == 0
    assert [ranks[rank][0]["SLURMD_NODENAME"] for rank in (0, 1)] == ["n1", "n2"]
    assert {environment["OMP_NUM_THREADS"] for environment, _, _ in ranks.values()} == {"7"}


def test_nodes_and_devices_per_node_choose_where(job: Job, script: Script) -> None:
    _, out, _ = job.launch("--nodes", "1", "--devices-per-node=3", script(SHOW)).wait()
    assert [environment["SLURMD_NODENAME"] for environment, _, _ in shown(out).values()] == ["n1"] * 3


def test_arguments_arrive_literally(job: Job, script: Script) -> None:
    given = ["$HOME; echo x", "a b", "", "'\"`\\", "*", "-n", "9", "--", "ü\n"]
    _, out, _ = job.launch(script(SHOW), *given).wait()
    assert [arguments for _, arguments, _ in shown(out).values()] == [given, given]


def test_programs_and_modules_are_started(job: Job) -> None:
    code, out, _ = job.launch("-n", "2", "--", "sh", "-c", 'echo "$0 $RANK"', "a;b").wait()
    assert (code, sorted(out.splitlines())) == (0, ["[rank 0] a;b 0", "[rank 1] a;b 1"])
    code, out, _ = job.launch("--nodes", "1", "-m", "calendar", "--help").wait()
    assert code == 0
    assert out.startswith("[rank 0] usage: ")


def test_gpus_decide_how_many_ranks(make_job: Callable[..., Job], script: Script) -> None:
    job = make_job("n1", "n2", devices=["0,1", "3"])
    _, out, _ = job.launch(script(SHOW), environment={"CUDA_VISIBLE_DEVICES": "7,8,9"}).wait()
    ranks = shown(out)
    assert [ranks[rank][0]["CUDA_VISIBLE_DEVICES"] for rank in sorted(ranks)] == ["0,1", "0,1", "3"]
    code, out, errors = job.launch("-n", "4", script(SHOW)).wait()
    assert (code, out) == (2, "")
    assert errors == (
        "carme-run: 4 ranks were requested, but the job has room for 3, one per GPU (n1: 2, n2: 1). "
        "Use -n 3 or less, or --devices-per-node K for K ranks on each node whatever GPUs it has.\n"
    )


def test_more_nodes_than_the_job_has_are_refused(job: Job, script: Script) -> None:
    code, _, errors = job.launch("--nodes", "3", script(SHOW)).wait()
    assert code == 2
    assert "--nodes 3 was requested, but the job has 2. Use --nodes 2 or less" in errors


def test_ranks_have_standard_error_and_an_empty_input(job: Job, script: Script) -> None:
    text = "import sys; print(repr(sys.stdin.read())); print('wrong', file=sys.stderr)"
    code, out, errors = job.launch("--nodes", "1", script(text)).wait()
    assert (code, out, errors) == (0, "[rank 0] ''\n", "[rank 0] wrong\n")


def test_lines_arrive_while_the_ranks_still_run(job: Job, script: Script, witness: Witness) -> None:
    text = MEET + "print('here', flush=True); witness.recv(2); print('there')"
    run = job.launch(script(text), environment=witness.environment)
    witness.expect(2)
    assert sorted([run.line(), run.line()]) == ["[rank 0] here", "[rank 1] here"]
    witness.release()
    code, out, _ = run.wait()
    assert (code, sorted(out.splitlines())) == (0, ["[rank 0] there", "[rank 1] there"])


def test_a_rank_that_fails_ends_the_run_with_its_traceback(
    job: Job, script: Script, witness: Witness
) -> None:
    text = MEET + (
        "witness.recv(2)\n"
        "if os.environ['RANK'] == '2': raise ValueError('rank two is broken')\n"
        "witness.recv(1)"
    )
    run = job.launch("-n", "4", script(text), environment=witness.environment)
    witness.expect(4)
    witness.release()
    code, _, errors = run.wait()
    assert code == 1
    assert witness.all_gone()
    reported, _, traceback = errors.partition("carme-run: ")
    assert "[rank 2] ValueError: rank two is broken" in reported
    assert traceback.startswith(
        "Rank 2 on n2 ended with exit code 1, so the others were stopped. Its last error output:\n"
        "Traceback (most recent call last):\n"
    )
    assert traceback.endswith("ValueError: rank two is broken\n")


@pytest.mark.parametrize(
    ("how", "expected", "words"),
    [
        ("sys.exit(7)", 7, "Rank 1 on n2 ended with exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "Rank 1 on n2 was killed by signal 9 (SIGKILL)"),
        ("os.abort()", 134, "Rank 1 on n2 was killed by signal 6 (SIGABRT)"),
    ],
)
def test_the_exit_code_is_that_of_the_failed_rank(
    job: Job, script: Script, how: str, expected: int, words: str
) -> None:
    text = f"import os, sys, time\nif os.environ['RANK'] == '1': {how}\nelse: time.sleep(600)"
    code, _, errors = job.launch(script(text)).wait()
    assert code == expected
    assert words in errors


def test_ctrl_c_reaches_all_ranks(job: Job, script: Script, witness: Witness) -> None:
    text = MEET + (
        "try: witness.sendall(b'r'); witness.recv(1)\n"
        "except KeyboardInterrupt: print('saved', flush=True); raise"
    )  # fmt: skip
    run = job.launch("-n", "4", script(text), environment=witness.environment)
    witness.expect(4)
    witness.wait_until_ready()
    run.popen.send_signal(signal.SIGINT)
    code, out, errors = run.wait()
    assert code == 130
    assert sorted(out.splitlines()) == [f"[rank {rank}] saved" for rank in range(4)]
    assert "carme-run: The run was interrupted." in errors
    assert witness.all_gone()


def test_a_second_ctrl_c_kills(job: Job, script: Script, witness: Witness) -> None:
    text = MEET + (
        "import signal\n"
        "signal.signal(signal.SIGINT, lambda *_: print('no', flush=True))\n"
        "witness.sendall(b'r')\n"
        "while True: witness.recv(1)"
    )
    run = job.launch(script(text), environment=witness.environment)
    witness.expect(2)
    witness.wait_until_ready()
    run.popen.send_signal(signal.SIGINT)
    assert sorted([run.line(), run.line()]) == ["[rank 0] no", "[rank 1] no"]
    run.popen.send_signal(signal.SIGINT)
    assert run.wait()[0] == 137
    assert witness.all_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_is_passed_on(job: Job, script: Script, witness: Witness, number: signal.Signals) -> None:
    run = job.launch(script(MEET + "witness.recv(1)"), environment=witness.environment)
    witness.expect(2)
    run.popen.send_signal(number)
    code, _, errors = run.wait()
    assert (code, errors) == (143, "carme-run: The run was ended by a signal.\n")
    assert witness.all_gone()


def test_a_run_under_nohup_outlives_its_terminal(job: Job, script: Script, witness: Witness) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what is started inherits that
    try:
        run = job.launch(script(MEET + "witness.recv(2)"), environment=witness.environment)
    finally:
        signal.signal(signal.SIGHUP, before)
    witness.expect(2)
    run.popen.send_signal(signal.SIGHUP)
    witness.release()
    assert run.wait()[0] == 0


def test_a_killed_launcher_leaves_no_ranks(job: Job, script: Script, witness: Witness) -> None:
    # A child of the rank is in its process group, and must go with it.
    text = MEET + "os.set_inheritable(witness.fileno(), True); os.fork(); witness.recv(1)"
    run = job.launch("-n", "4", script(text), environment=witness.environment)
    witness.expect(4)
    run.popen.kill()
    assert witness.all_gone()


def test_a_run_ends_when_nobody_reads_its_output(job: Job, script: Script, witness: Witness) -> None:
    text = MEET + "witness.recv(2)\nwhile True: print('x' * 1000)"
    run = job.launch(script(text), environment=witness.environment)
    witness.expect(2)
    assert run.popen.stdout
    run.popen.stdout.close()
    witness.release()
    assert run.popen.wait(HANG) == 141
    assert witness.all_gone()


def test_a_huge_line_waits_for_its_reader_in_little_memory(
    job: Job, script: Script, witness: Witness
) -> None:
    write = "sys.stdout.write('x' * 2**20)"
    text = MEET + f"{write}; witness.sendall(b'r')\nfor _ in range(39): {write}"
    run = job.launch("--nodes", "1", script(text), environment=witness.environment)
    witness.expect(1)
    witness.wait_until_ready()
    assert run.popen.stdout
    seen, rest, peak = 0, "", 0
    while piece := run.popen.stdout.read(2**20):
        if seen < 35 * 2**20:
            peak = peak_memory(run)
        seen += piece.count("x")
        rest = piece
    assert seen == 40 * 2**20
    assert rest.endswith("\n")
    assert max(peak, peak_memory(job.first)) < 50 * 2**20
    assert run.popen.wait(HANG) == 0


def peak_memory(process: Process) -> int:
    """Bytes."""
    with open(f"/proc/{process.popen.pid}/status") as status:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def test_undecodable_output_is_shown(job: Job, script: Script) -> None:
    code, out, _ = job.launch("--nodes", "1", "--", "printf", r"a\377b\r\nc").wait()
    assert (code, out) == (0, "[rank 0] a\ufffdb\n[rank 0] c\n")
