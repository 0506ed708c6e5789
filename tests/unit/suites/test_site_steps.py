"""What the suite of real sites notes of its steps, and what it takes from its caches."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from certificates import self_signed
from free_ports import free_port
from sites import existing_22_05, existing_26_05, site_hosts
from sites.existing_slurm import USERS
from sites.package_index import PackageIndex
from sites.record import Record, attempt, slowest_tasks

from patience import HANG
from suites import plan
from suites.arguments import SITES

TESTS = Path(__file__).resolve().parents[2]


def read(folder: Path) -> dict[str, dict[str, dict[str, object]]]:
    return json.loads((folder / "example.json").read_text())


def test_a_step_is_on_disk_from_its_beginning_on(tmp_path: Path) -> None:
    record = Record("example", folder=tmp_path)
    with record.step("install"):
        assert read(tmp_path)["steps"]["install"]["outcome"] == "running"
    noted = read(tmp_path)["steps"]["install"]
    assert noted["outcome"] == "ok" and isinstance(noted["seconds"], int)
    with pytest.raises(ValueError), record.step("check"):
        raise ValueError("no such node\nand more")
    assert read(tmp_path)["steps"]["check"]["outcome"] == "failed: no such node"
    with record.step("remove") as noted:
        noted["code"] = 2
    assert read(tmp_path)["steps"]["remove"]["outcome"] == "ended with 2"
    record.note_test("test_it_works", "passed")
    assert read(tmp_path)["tests"] == {"test_it_works": "passed"}


def test_a_run_goes_on_after_the_steps_that_came_to_their_end(tmp_path: Path) -> None:
    record = Record("example", folder=tmp_path)
    with record.step("install"):
        record.keep("job", "COMPLETED")
    with pytest.raises(ValueError), record.step("check"):
        raise ValueError("no such node")
    later = Record("example", resume=True, folder=tmp_path)
    assert later.is_done("install") and not later.is_done("check") and not later.is_done("remove")
    assert later.results == {"job": "COMPLETED"}
    assert not Record("example", folder=tmp_path).is_done("install")


@pytest.fixture
def broken() -> None:
    raise ValueError("no such node")


@pytest.fixture
def overdue() -> None:
    pytest.fail("Timeout")


@pytest.fixture
def fine() -> list[str]:
    return ["done"]


@pytest.fixture
def last(request: pytest.FixtureRequest) -> str:
    attempt(request, "broken", "overdue", "fine")
    return "removed"


def test_a_step_follows_steps_that_failed(last: str, request: pytest.FixtureRequest) -> None:
    assert last == "removed"
    with pytest.raises(ValueError, match="no such node"):
        request.getfixturevalue("broken")
    assert request.getfixturevalue("fine") == ["done"]


def test_the_times_of_tasks_are_noted_while_a_playbook_runs(tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    tasks = [
        {"name": "Say hello", "ansible.builtin.debug": {"msg": "hello"}},
        {"name": "Take long", "ansible.builtin.command": {"argv": ["sleep", "1"]}},
        {"name": "See what is there by now", "ansible.builtin.command": {"argv": ["cat", str(times)]}},
        {"name": "Fail", "ansible.builtin.fail": {"msg": "as it must"}},
    ]
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}
    playbook = tmp_path / "playbook.yml"
    playbook.write_text(yaml.safe_dump([play]))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_CALLBACK_PLUGINS": str(site_hosts.CALLBACKS),
        "ANSIBLE_CALLBACKS_ENABLED": "task_times",
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
        "CARME_TASK_TIMES": str(times),
    }
    words = [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", "-vv", playbook]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    known = json.loads(times.read_text())
    assert [task["task"] for task in known] == [task["name"] for task in tasks], done.stdout
    assert known[1]["seconds"] >= 1 and all(task["seconds"] is not None for task in known)
    assert "Take long" in done.stdout.partition("See what is there by now")[2]
    assert max(slowest_tasks(times).values()) == next(iter(slowest_tasks(times).values()))


def test_what_a_playbook_has_started_ends_with_an_interrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise RuntimeError("interrupted")

    wait = subprocess.Popen.wait

    def begin_to_wait(process: subprocess.Popen[str], *timeout: float) -> int:
        (tmp_path / "waits").touch()
        return wait(process, *timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", begin_to_wait)
    # Interrupted while it waits: before that nobody has the process, which could not be ended.
    script = "sleep 600 & echo $! >worker; until test -e waits; do sleep 0.05; done; kill -USR1 $PPID; wait"
    former = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with (tmp_path / "log").open("w") as log, pytest.raises(RuntimeError, match="interrupted"):
            site_hosts.run_group(["sh", "-c", script], HANG, cwd=tmp_path, env=os.environ, output=log)
    finally:
        signal.signal(signal.SIGUSR1, former)
    status = Path(f"/proc/{(tmp_path / 'worker').read_text().strip()}/stat")
    end = time.monotonic() + HANG
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "the worker still runs"
        time.sleep(0.05)


def test_a_missing_file_of_times_has_no_tasks(tmp_path: Path) -> None:
    assert slowest_tasks(tmp_path / "missing.json") == {}


def test_layers_of_images_serve_the_next_site_and_images_are_built_anew(tmp_path: Path) -> None:
    known, target = tmp_path / "known", tmp_path / "target"
    layers = {"debian-12.tar", "debian-12.json", "base_libraries-34.sif", "base_libraries-34.json"}
    for name in (
        *layers,
        "base-56.sif",
        "base-56.json",
        "lock",
        "pip/runtime-78/a.whl",
        "pip/runtime-78/complete",
    ):
        (known / name).parent.mkdir(parents=True, exist_ok=True)
        (known / name).write_text(name)
    site_hosts.link_layers(known, target)
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == layers | {"pip/runtime-78/a.whl", "pip/runtime-78/complete"}
    (target / "debian-12.tar").unlink()
    assert (known / "debian-12.tar").read_text() == "debian-12.tar"
    site_hosts.link_layers(tmp_path / "nothing", target)


def test_packages_of_the_demo_and_of_all_sites_serve_a_new_host(tmp_path: Path) -> None:
    demo, sites = tmp_path / "demo", tmp_path / "sites"
    target = sites / "new/cache/apt/portal"
    for file in (
        demo / "apt/head/redis_8.deb",
        demo / "apt/n1/redis_8.deb",
        demo / "apt/n1/partial/half_1.deb",
        sites / "old/cache/apt/portal/nginx_1.deb",
        sites / "new/cache/apt/node-1/slurmd_26.deb",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    for _time in range(2):
        site_hosts.link_packages(target, sites, demo)
        found = {file.name: file.read_text() for file in target.iterdir()}
        assert found == {name: name for name in ("redis_8.deb", "nginx_1.deb", "slurmd_26.deb")}


def wheel(folder: Path, name: str) -> Path:
    """A wheel as pip takes it, of a package with nothing in it."""
    about = f"{name}-1.0.dist-info"
    file = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return file


class Upstream(ThreadingHTTPServer):
    """A package index with one package, which counts its requests."""

    def __init__(self, file: Path) -> None:
        self.requests: list[str] = []
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        page = f'<a href="../../some%20files/{file.name}#sha256={digest}">{file.name}</a>'
        answers = {"/simple/example/": page.encode(), f"/some%20files/{file.name}": file.read_bytes()}
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                content = answers.get(self.path)
                if content is None:
                    return self.send_error(404)
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None: ...

        super().__init__(("127.0.0.1", free_port()), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def download(index: int, target: Path, name: str = "example") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", str(target)]
    words += ["--retries", "0", "--index-url", f"http://127.0.0.1:{index}/simple/", name]
    environment = {"PATH": os.environ["PATH"], "HOME": str(target), "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG, check=False)


def test_the_mirror_of_the_package_index_fetches_what_it_has_not(tmp_path: Path) -> None:
    upstream, port = Upstream(wheel(tmp_path, "example")), free_port()
    address = f"http://127.0.0.1:{upstream.server_address[1]}/simple"
    index = PackageIndex(tmp_path / "index", address, "127.0.0.1", port)
    try:
        for place in ("first", "second"):
            done = download(port, tmp_path / place)
            assert done.returncode == 0, done.stdout + done.stderr
            assert (tmp_path / place / "example-1.0-py3-none-any.whl").exists()
        assert sorted(upstream.requests) == ["/simple/example/", "/some%20files/example-1.0-py3-none-any.whl"]
        missing = download(port, tmp_path / "third", "nothing")
        assert missing.returncode != 0 and "/simple/nothing/" in upstream.requests
        upstream.shutdown()
        upstream.server_close()
        os.utime(next((tmp_path / "index/pages").glob("*-example")), (0, 0))
        later = download(port, tmp_path / "later")
        assert later.returncode == 0, later.stdout + later.stderr
    finally:
        index.close()


def test_each_site_has_its_tests() -> None:
    for site in SITES:
        file, _colons, name = plan.target_of_site(site).partition("::")
        source = (TESTS.parent / file).read_text()
        assert not name or f"class {name}(" in source, site
        assert "def test_" in source, site


def test_sites_differ_in_what_their_own_files_say() -> None:
    old, new = (site.SITE.files("etc/slurm") for site in (existing_22_05, existing_26_05))
    assert old.keys() == new.keys() >= {"slurm.conf", "prolog", "job_submit.lua", "slurmdbd.conf"}
    assert b"NodeAddr=10.78.0.11" in old["slurm.conf"] and b"NodeAddr=10.81.0.11" in new["slurm.conf"]
    assert b"10.78." not in b"".join(new.values())
    assert b"CgroupAutomount" in old["cgroup.conf"] and b"CgroupAutomount" not in new["cgroup.conf"]
    assert old["prolog"] == new["prolog"]
    assert b"\nNamespaceType=" in new["slurm.conf"] and b"JobContainerType" not in new["slurm.conf"]


#: Where `./test` unpacks slapd; else the system's.
SLAPD = Path(os.environ.get("CARME_SLAPD", "/"))


@pytest.mark.skipif(not (SLAPD / "usr/sbin/slapd").exists(), reason="there is no slapd; ./test fetches it")
def test_the_sites_directory_knows_its_users(tmp_path: Path) -> None:
    files = existing_22_05.SITE.files("etc/ldap")
    (tmp_path / "data").mkdir()
    for name, content in zip(("pem", "key"), self_signed("ctl.example.org"), strict=True):
        (tmp_path / f"directory.{name}").write_bytes(content)
    text = files["slapd.conf"].decode()
    for there, here in {
        "/etc/ldap/schema": SLAPD / "etc/ldap/schema",
        "/etc/ldap/directory": tmp_path / "directory",
        "/usr/lib/ldap": SLAPD / "usr/lib/ldap",
        "/var/lib/directory": tmp_path / "data",
    }.items():
        assert there in text
        text = text.replace(there, str(here))
    (tmp_path / "slapd.conf").write_text(text)
    (tmp_path / "people.ldif").write_bytes(files["people.ldif"])
    slapd = [str(SLAPD / "usr/sbin/slapd"), "-f", str(tmp_path / "slapd.conf")]
    environment = os.environ | {"LD_LIBRARY_PATH": str(SLAPD / "usr/lib/x86_64-linux-gnu")}
    known = ""
    for words in (["-T", "add", "-l", str(tmp_path / "people.ldif")], ["-T", "cat"]):
        command = [slapd[0], *words[:2], *slapd[1:], *words[2:]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        known = done.stdout
    people = {}
    for entry in known.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line)
        if "uidNumber" in fields:
            people[fields["uid"]] = int(fields["uidNumber"])
            assert fields["homeDirectory"] == f"/data/home/{fields['uid']}"
    assert people == USERS
