"""A user's own image: built by the user's job with a hostile definition, started in, changed, deleted."""

import json
import os
from typing import Any

from carme.validation import Visitor
from demo_site import DemoSite, wait_until
from patience import HANG

NAME = f"test-{os.urandom(4).hex()}"
PAGE = f"images/at/{NAME}@user1/"
# What it tries, outside of the container and in it, as the "root" that a build believes to be. What works is
# written down in the image.
ATTACKS = {
    "shadow": "cat /etc/shadow",
    "secrets": "cat /etc/carme/secrets/portal-secret-key",
    "home": "ls /home/user2",
    "images": "touch /srv/carme/images/evil.sif",
    "copies": "touch /var/cache/carme/node-images/evil.sif",
    "root": "chown root:root {made}/owned && test $(stat -c %u {made}/owned) = 0 && touch /etc/evil",
    "kill": "kill -0 $(pgrep -o slurmd)",
}
DEFINITION = """\
Bootstrap: localimage
From: {{{{ base }}}}

%setup
    mkdir -p "$APPTAINER_ROOTFS/opt/mine"
    made="$APPTAINER_ROOTFS/opt/mine"
    touch $made/owned
{outside}
    echo hello >$made/greeting

%post
    mkdir -p /opt/mine
    made=/opt/mine
{inside}
"""


def definition() -> str:
    def steps(where: str, names: list[str]) -> str:
        lines = [
            f"    if ({ATTACKS[name].format(made='$made')}) >/dev/null 2>&1; "
            f"then echo {where}-{name} >>$made/worked; fi"
            for name in names
        ]
        return "\n".join(lines)

    # In the container /etc is the image's own. Not /root: there, Apptainer shows a build the user's home.
    inside = [name for name in ATTACKS if name not in ("shadow", "root")]
    return DEFINITION.format(outside=steps("setup", list(ATTACKS)), inside=steps("post", inside))


def built(visitor: Visitor, page: str) -> str:
    """The page of an image whose build has ended."""
    address = f"{visitor.url}{page}"
    wait_until(
        "the image is built", lambda: ">Being built<" not in visitor.fetch(address).text, timeout=2 * HANG
    )
    return visitor.fetch(address).text


def session_in(visitor: Visitor, image: str) -> str:
    """What a session's notebook in this image knows of a package that the site's images have not."""
    assert image in visitor.fetch(visitor.url).text, "the start form lists it"
    options = {"image": image, "nodes": "1", "gpus_per_node": "0", "minutes": "10", "title": "Own image"}
    name = visitor.start(options)
    visitor.wait(name, "ready", timeout=HANG)
    server = visitor.open(name)
    lab = visitor.fetch(f"{server}lab")
    assert lab.status_code == 200 and "<title>JupyterLab</title>" in lab.text
    with visitor.kernel(server) as kernel:
        cell = kernel.run("import einops; print(einops.__file__, einops.__version__)", timeout=HANG)
    visitor.stop(name)
    visitor.wait(name, "ended", timeout=HANG)
    return cell.output + cell.error


def form(visitor: Visitor, page: str, field: str, **values: str) -> Any:
    shown = visitor.fetch(f"{visitor.url}{page}")
    return visitor.send(shown, visitor.form(shown, field), values)


def run_in(demo: DemoSite, visitor: Visitor, image: str, command: str) -> dict[str, Any]:
    """A batch job of the visitor's, submitted in the browser; what Slurm knows of it at its end."""
    script = f"#!/bin/sh\n{command}\n"
    time = {"time": "custom", "hours": "0", "minutes": "5"}
    answer = form(visitor, "jobs/submit/", "script", script=script, image=image, **time)
    number = int(str(answer.url).rstrip("/").rpartition("/")[2])

    def over() -> dict[str, Any] | None:
        known = demo.carme_json("jobs", "--all-states")
        return next((job for job in known if job["id"] == number and job["ended"]), None)

    return wait_until("the job is over", over)


def test_an_image_of_ones_own_gives_no_rights_and_runs_only_as_it_was_built(demo: DemoSite) -> None:
    with demo.visitor("user1") as owner, demo.visitor("user2") as visitor:
        answer = form(owner, "images/build/", "text", name=NAME, kind="definition", text=definition())
        assert str(answer.url).endswith(PAGE), answer.text
        page = built(owner, PAGE)
        assert ">Ready<" in page and "jupyterlab" in page, page
        assert visitor.fetch(f"{visitor.url}{PAGE}").status_code == 404
        try:
            folder = "/home/user1/.local/share/carme/images"
            found = demo.run("head", "sh", "-c", f"stat -c '%U %a %n' {folder}/{NAME}-*.sif").stdout.split()
            assert found[:2] == ["user1", "600"]
            done = run_in(demo, owner, f"{NAME}@user1", "cat /opt/mine/greeting; cat /opt/mine/worked")
            log = demo.carme("logs", str(done["id"])).stdout
            assert "hello" in log.splitlines(), log
            assert "setup-" not in log and "post-" not in log, log
            for host in ("head", "n1", "n2"):
                for path in (
                    "/srv/carme/images/evil.sif",
                    "/var/cache/carme/node-images/evil.sif",
                    "/etc/evil",
                ):
                    assert demo.run(host, "test", "-e", path, check=False).returncode, f"{path} on {host}"

            # Another one is not run by that name.
            demo.run("head", "cp", "/dev/null", found[2], user="user1")
            done = run_in(demo, owner, f"{NAME}@user1", "echo it ran")
            assert "is not what was built" in demo.carme("logs", str(done["id"])).stdout
            assert json.dumps(done).find("build it again") > 0, done
        finally:
            delete = owner.fetch(f"{owner.url}{PAGE}delete/")
            owner.send(delete, owner.form(delete, "delete"), {})
        assert owner.fetch(f"{owner.url}{PAGE}").status_code == 404
        assert demo.run("head", "test", "-e", found[2], check=False).returncode


def test_sessions_run_in_an_image_of_packages_which_a_project_shares(demo: DemoSite, project: str) -> None:
    name, folder = f"{NAME}-pip", "/scratch"
    reference, page = f"{name}@user1", f"images/at/{name}@user1/"
    with (
        demo.visitor("user1") as owner,
        demo.visitor("user2") as member,
        demo.visitor("admin") as stranger,
    ):
        form(owner, "images/build/", "text", name=name, kind="requirements", base="base", text="einops\n")
        try:
            shown = built(owner, page)
            assert ">Ready<" in shown and "einops" in shown, shown
            assert "/opt/carme/env/" in session_in(owner, reference)

            assert member.fetch(f"{member.url}{page}").status_code == 404
            refused = form(owner, f"{page}share/", "project", project=project)
            assert refused.status_code == 422 and "cannot read your home" in refused.text
            form(owner, f"{page}share/", "project", project=project, folder=folder)
            assert "/opt/carme/env/" in session_in(member, reference)
            # An administrator of the site is not a member of the project.
            assert stranger.fetch(f"{stranger.url}{page}").status_code == 404
            assert reference not in stranger.fetch(stranger.url).text
            assert member.fetch(f"{member.url}{page}share/").status_code == 404

            form(owner, f"{page}share/", "project", project="")
            assert member.fetch(f"{member.url}{page}").status_code == 404
            files = demo.run("head", "sh", "-c", f"stat -c '%U %a' {folder}/{name}-*.sif").stdout
            assert files == "user1 600\n", "who is not a member any more does not read it either"
        finally:
            delete = owner.fetch(f"{owner.url}{page}delete/")
            owner.send(delete, owner.form(delete, "delete"), {})
