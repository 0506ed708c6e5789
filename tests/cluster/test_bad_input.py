"""Bad input at every interface of the running site gets one clear sentence and leaves nothing behind."""

import json

import pytest

from carme.errors import CarmeError
from demo_site import DemoSite, wait_until
from patience import HANG

# Each text would do harm, or at least leave a trace, in a shell, a job script, SQL or a page.
HOSTILE = [
    "$(touch /tmp/carme-was-here)",
    "`touch /tmp/carme-was-here`",
    "; touch /tmp/carme-was-here #",
    "| touch /tmp/carme-was-here",
    "' OR '1'='1",
    '"><script>alert(1)</script>',
    "a\nb #SBATCH --uid=0",
    "../../etc/passwd",
    "%j %x %u",
    "--uid=0",
    "\N{RIGHT-TO-LEFT OVERRIDE}gpj.exe \N{SMILING FACE WITH SUNGLASSES}",
]
ONE_BY_ONE = """
import contextlib, io, json, sys
from carme.cli import main

said = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    except SystemExit as end:
        code = end.code
    said.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""
START = {"image": "base", "nodes": "1", "gpus_per_node": "0", "minutes": "5", "title": "bad input"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image": "nosuch"}, ["nosuch", "base", "torch"]),
        ({"gpus_per_node": "9"}, ["4", "9"]),
        ({"nodes": "50"}, ["2", "50"]),
        ({"minutes": "0"}, ["at least one minute"]),
        ({"minutes": "99999999"}, ["at most"]),
        ({"minutes": "soon"}, ["number"]),
    ],
)
def test_the_start_form_refuses_what_can_never_start(
    demo: DemoSite, change: dict[str, str], words: list[str]
) -> None:
    before = demo.job_ids()
    with demo.visitor(demo.user) as visitor, pytest.raises(CarmeError) as refused:
        visitor.start(START | change)
    for word in words:
        assert word in str(refused.value)
    assert demo.job_ids() <= before


def test_hostile_text_in_any_field_of_the_start_form_is_refused_or_harmless(demo: DemoSite) -> None:
    with demo.visitor(demo.user) as visitor:
        for field in START:
            for text in HOSTILE:
                try:
                    name = visitor.start(START | {field: text})
                except CarmeError:
                    continue
                assert field == "title", f"{text!r} was accepted as {field}"
                visitor.stop(name)
                visitor.wait(name, "ended", timeout=HANG)
    for node in ("head", "n1", "n2"):
        assert demo.run(node, "test", "-e", "/tmp/carme-was-here", check=False).returncode != 0


@pytest.mark.alone
def test_hostile_text_in_any_option_of_the_command_line_is_refused_or_harmless(demo: DemoSite) -> None:
    options = ("--name", "--image", "--partition", "--gpu-type", "--nodes", "--gpus", "--time")
    words = [["submit", f"{option}={text}", "--", "true"] for option in options for text in HOSTILE]
    for tried, (code, out, err) in zip(words, commands(demo, words), strict=True):
        assert code in {1, 2}, f"{tried}: {out}"
        assert "Traceback" not in err
    words = [["submit", "--json", "--time", "1", "--", "printf", "%s", text] for text in HOSTILE]
    jobs = [str(json.loads(out)["job_id"]) for _, out, _ in commands(demo, words)]
    logs = [["logs", job] for job in jobs]
    wait_until(
        "each job printed its argument",
        lambda: all(text in out for text, (_, out, _) in zip(HOSTILE, commands(demo, logs), strict=True)),
    )
    for node in ("head", "n1", "n2"):
        assert demo.run(node, "test", "-e", "/tmp/carme-was-here", check=False).returncode != 0


def commands(demo: DemoSite, words: list[list[str]]) -> list[tuple[int, str, str]]:
    """What the user's `carme` answers to each list of words, from one process: exit code, output, errors."""
    text = demo.run("head", "/opt/carme/venv/bin/python", "-c", ONE_BY_ONE, json.dumps(words), user=demo.user)
    return [(code, out, err) for code, out, err in json.loads(text.stdout)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--image", "nosuch", "--", "true"], ["nosuch", "torch"]),
        (["--gpus", "9", "--", "true"], ["at most 4 GPUs", "9"]),
        (["--time", "0", "--", "true"], ["time"]),
        (["--time", "999d", "--", "true"], ["at most"]),
        (["/home/user1/nosuch.sh"], ["/home/user1/nosuch.sh"]),
    ],
)
def test_the_command_line_refuses_with_the_reason(
    demo: DemoSite, arguments: list[str], words: list[str]
) -> None:
    before = demo.job_ids()
    done = demo.carme("submit", *arguments, check=False)
    assert done.returncode in {1, 2}
    for word in words:
        assert word in done.stderr
    assert demo.job_ids() <= before


@pytest.mark.alone
def test_somebody_unknown_to_slurm_gets_a_message(demo: DemoSite) -> None:
    demo.run("head", "sh", "-c", "id guest >/dev/null 2>&1 || useradd -m -u 2999 guest")
    try:
        done = demo.carme("submit", "--", "true", user="guest", check=False)
        assert done.returncode == 1
        assert "guest" in done.stderr or "account" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        demo.run("head", "userdel", "-r", "guest", check=False)


def test_a_wrong_key_in_the_site_file_names_the_nearest_right_one(demo: DemoSite) -> None:
    demo.run(
        "head",
        "sh",
        "-c",
        "sed 's/^default_partition/defualt_partition/' /etc/carme/carme.toml > /tmp/wrong.toml",
    )
    done = demo.run("head", "/opt/carme/venv/bin/carme", "config", "check", "/tmp/wrong.toml", check=False)
    assert done.returncode == 1
    assert "defualt_partition" in done.stderr
    assert "'default_partition'" in done.stderr
