"""What users set for their shells and for Python reaches their programs, and breaks nothing of ours."""

import json
from collections.abc import Iterator

import pytest

from carme.jobs import JobState
from demo_site import DemoSite, wait_until
from patience import HANG

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
USER, HOME = "user2", "/home/user2"


@pytest.fixture
def profile(demo: DemoSite) -> Iterator[None]:
    """The user's login files are as they were, afterwards."""
    keep = "for f in .profile .bash_profile .bash_login; do [ ! -e $f ] || mv $f $f.kept; done"
    back = "for f in .profile .bash_profile .bash_login; do rm -f $f; [ ! -e $f.kept ] || mv $f.kept $f; done"
    # Only once `keep` has run may `back` remove what is there: the mark says so.
    undo = f"cd {HOME} && [ ! -e .files-kept ] || {{ {back}; rm -rf shadow .files-kept; }}"
    with demo.undoing(("head", "runuser", "-u", USER, "--", "sh", "-c", undo)):
        demo.run("head", "sh", "-c", f"{keep}; touch .files-kept", user=USER)
        yield


def submitted(demo: DemoSite, *arguments: str) -> int:
    done = demo.carme("submit", "--json", "--time", "5m", *arguments, user=USER)
    return json.loads(done.stdout)["job_id"]


def written(demo: DemoSite, *arguments: str) -> str:
    """What a job of the user wrote."""
    return demo.carme("logs", "-f", str(submitted(demo, *arguments)), user=USER, timeout=HANG).stdout


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize("image", [(), ("--image", "base")])
def test_settings_of_python_are_for_the_users_programs(demo: DemoSite, image: tuple[str, ...]) -> None:
    text = "export PYTHONHOME=/nonexistent PYTHONPATH=$HOME/shadow\n"
    demo.run("head", "sh", "-c", "cat > .profile; mkdir -p shadow", user=USER, data=text)
    demo.run("head", "tee", f"{HOME}/shadow/json.py", user=USER, data="raise SystemExit('the wrong json')\n")
    output = written(demo, *image, "--", "env")
    assert "Traceback" not in output and "wrong json" not in output
    assert ("PYTHONHOME=/nonexistent" in output) == (not image)
    wrong = ("env", "PYTHONHOME=/nonexistent", f"PYTHONPATH={HOME}/shadow")
    jobs = demo.run("head", *wrong, "/opt/carme/venv/bin/carme", "jobs", "--json", user=USER)
    assert isinstance(json.loads(jobs.stdout), list)
    inside = written(demo, "--image", "base", "--", *wrong, "carme-run", "--version")
    assert "Traceback" not in inside and inside.strip()


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize(
    ("text", "words"),
    [("exit 1", "with exit code 1 before the job's command"), ("exec sleep 1000", "had not ended after 30")],
)
def test_login_files_that_fail_are_named_and_the_job_runs(demo: DemoSite, text: str, words: str) -> None:
    demo.run("head", "tee", f"{HOME}/.profile", user=USER, data=f"{text}\n")
    output = written(demo, "--", "/usr/bin/python3", "-c", SHOW)
    environment = json.loads(output[output.index("{") :])
    assert words in output
    assert (environment["HOME"], environment["USER"], environment["LOGNAME"]) == (HOME, USER, USER)
    assert environment["SHELL"].startswith("/")


@pytest.mark.alone
@pytest.mark.usefixtures("profile")
def test_a_login_shell_that_is_not_there_is_named_and_the_job_runs(demo: DemoSite) -> None:
    """On one node, as after a site has removed a shell there."""
    before = demo.run("n1", "getent", "passwd", USER).stdout.strip().rsplit(":", 1)[1]
    with demo.undoing(("n1", "usermod", "--shell", before, USER)):
        demo.run("n1", "usermod", "--shell", "/no/such/shell", USER)
        job = submitted(demo, "--nodes", "2", "--", "/usr/bin/env")
        wait_until("it has ended", lambda: demo.job_state(job, USER) is JobState.COMPLETED)
        output = demo.carme("logs", str(job), user=USER).stdout
    assert "Your login shell /no/such/shell cannot be started on n1" in output
    assert f"HOME={HOME}\n" in output and "SHELL=/bin/sh\n" in output
