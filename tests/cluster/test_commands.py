"""`carme` and `carme-run` are found wherever the documentation has users type them.

A session's terminal is in `test_shell.py`.
"""

import json

import pytest

from demo_site import DemoSite

FIND = "command -v carme; carme --version"


@pytest.mark.parametrize("host", ["head", "n1"])
def test_carme_and_its_completion_are_on_every_host(demo: DemoSite, host: str) -> None:
    for shell in (("sh", "-c"), ("bash", "-lc")):
        for user in (None, "user1"):
            found = demo.run(host, *shell, FIND, user=user).stdout
            assert found.startswith("/usr/local/bin/carme\ncarme "), (shell, user, found)
    completes = demo.run(host, "bash", "-lc", "complete -p carme", user="user1").stdout
    assert completes.rstrip().endswith(" carme")


def test_the_command_that_the_demo_names_at_its_end_works(demo: DemoSite) -> None:
    assert demo.run("head", "carme", "status").stdout


@pytest.mark.parametrize("image", ["", "base", "torch"])
def test_commands_of_carme_are_in_jobs(demo: DemoSite, image: str) -> None:
    script = (
        f"{FIND}; mkdir /tmp/a; echo text >/tmp/a/b; carme data copy /tmp/a /tmp/c >/tmp/copied; cat /tmp/c/b"
    )
    options = []
    if image:
        script += "; for name in carme-run tmux vim less htop; do command -v $name; done"
        options = ["--image", image]
    submitted = demo.carme("submit", "--json", *options, "--time", "5", "--", "sh", "-c", script).stdout
    lines = demo.carme("logs", "--follow", str(json.loads(submitted)["job_id"])).stdout.splitlines()
    assert not [line for line in lines if "WARNING" in line]
    assert lines[0] == ("/opt/carme/env/bin/carme" if image else "/usr/local/bin/carme")
    assert lines[1].startswith("carme ") and lines[2] == "text"
    assert len(lines) == (8 if image else 3), lines
