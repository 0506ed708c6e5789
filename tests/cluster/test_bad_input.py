"""Bad input at every door of the running site: one clear sentence, and nothing left behind."""

import json

import pytest

from carme.errors import CarmeError
from demo_site import DemoSite, wait_until

# Each would do harm, or at least leave a mark, in a shell, a job script, SQL or a page.
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
START = {"image": "base", "nodes": "1", "gpus_per_node": "0", "minutes": "5", "title": "bad input"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image": "nosuch"}, ["nosuch", "base", "torch"]),
        ({"gpus_per_node": "9"}, ["4", "9"]),
        ({"nodes": "50"}, ["2", "50"]),
        ({"minutes": "0"}, ["1"]),
        ({"minutes": "99999999"}, ["at most"]),
        ({"minutes": "soon"}, ["number"]),
    ],
)
def test_the_start_form_refuses_what_can_never_start(
    demo: DemoSite, change: dict[str, str], words: list[str]
) -> None:
    with demo.visitor("user1") as visitor, pytest.raises(CarmeError) as refused:
        visitor.start(START | change)
    for word in words:
        assert word in str(refused.value)
    assert not demo.carme_json("jobs")


def test_hostile_text_in_every_field_of_the_start_form(demo: DemoSite) -> None:
    with demo.visitor("user1") as visitor:
        for field in START:
            for text in HOSTILE:
                try:
                    name = visitor.start(START | {field: text})
                except CarmeError:
                    continue
                assert field == "title", f"{text!r} was accepted as {field}"
                visitor.stop(name)
                visitor.wait(name, "ended", timeout=60)
    for node in ("head", "n1", "n2"):
        assert demo.run(node, "test", "-e", "/tmp/carme-was-here", check=False).returncode != 0


def test_hostile_text_in_every_option_of_the_command_line(demo: DemoSite) -> None:
    options = ("--name", "--image", "--partition", "--gpu-type", "--nodes", "--gpus", "--time")
    for option in options:
        for text in HOSTILE:
            done = demo.carme("submit", f"{option}={text}", "--", "true", check=False)
            assert done.returncode in {1, 2}, f"{option}={text!r}: {done.stdout}"
            assert "Traceback" not in done.stderr
    for text in HOSTILE:
        done = demo.carme("submit", "--json", "--time", "1", "--", "printf", "%s", text)
        job = str(json.loads(done.stdout)["job_id"])
        said = wait_until(
            "the job printed its argument",
            lambda job=job, text=text: text in demo.carme("logs", job, check=False).stdout,
        )
        assert said
    for node in ("head", "n1", "n2"):
        assert demo.run(node, "test", "-e", "/tmp/carme-was-here", check=False).returncode != 0


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
    done = demo.carme("submit", *arguments, check=False)
    assert done.returncode in {1, 2}
    for word in words:
        assert word in done.stderr
    assert not demo.carme_json("jobs")


def test_somebody_unknown_to_slurm_is_told_so(demo: DemoSite) -> None:
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
