"""The programs that roles run on hosts."""

import ctypes
import grp
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jinja2
import pytest

from carme_monitoring.jobs import Allocation, Allocations
from patience import HANG

ANSIBLE = Path(__file__).resolve().parents[3] / "ansible"
PACK = ANSIBLE / "roles/base/files/pack_part.py"


def load(role: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ANSIBLE / f"roles/{role}/files/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pack(source: Path, destination: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PACK), str(source), str(destination), *parts]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    part = tmp_path / "source/carme/src"
    (part / "__pycache__").mkdir(parents=True)
    (part / "__pycache__/a.pyc").write_bytes(b"left over")
    (part / "a.py").write_text("A = 1\n")
    (part.parent / "pyproject.toml").write_text("[project]\n")
    return tmp_path / "source"


def test_an_archive_depends_on_the_content_alone(source: Path, tmp_path: Path) -> None:
    first = json.loads(pack(source, tmp_path / "one", "carme").stdout)["carme"]
    os.utime(source / "carme/src/a.py", (1, 1))
    (source / "carme/src/__pycache__/b.pyc").write_bytes(b"more")
    (source / "carme/src/built.so").write_bytes(b"for another machine")
    second = json.loads(pack(source, tmp_path / "two", "carme").stdout)["carme"]
    assert first["sha256"] == second["sha256"]
    with tarfile.open(second["archive"]) as archive:
        assert archive.getnames() == ["carme/pyproject.toml", "carme/src/a.py"]
    (source / "carme/src/a.py").write_text("A = 2\n")
    with Path(second["archive"]).open("rb") as reader:
        assert (
            json.loads(pack(source, tmp_path / "two", "carme").stdout)["carme"]["sha256"] != first["sha256"]
        )
        # A reader meanwhile gets the whole older file.
        assert hashlib.sha256(reader.read()).hexdigest() == first["sha256"]
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["carme.tar.gz"]


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_what_is_compiled_is_brought_to_hosts_without_a_compiler(tmp_path: Path) -> None:
    names = f"copying-{platform.machine()}.so"
    first, packed = (
        json.loads(pack(ANSIBLE.parent, tmp_path / name, "carme").stdout)["carme"] for name in ("one", "two")
    )
    assert first["sha256"] == packed["sha256"]
    with tarfile.open(packed["archive"]) as archive:
        archive.extractall(tmp_path)
    library = tmp_path / "carme/src/carme/staging" / names
    assert ctypes.CDLL(str(library)).carme_interface() > 0
    # The content that hatchling packs if nothing can be compiled.
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheels")],
        cwd=tmp_path / "carme",
        env={**os.environ, "PATH": str(tmp_path), "CC": ""},
        check=True,
        capture_output=True,
    )
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as unpacked:
        assert unpacked.read(f"carme/staging/{names}") == library.read_bytes()
        (script,) = (name for name in unpacked.namelist() if name.endswith(".data/scripts/carme"))
        assert unpacked.read(script) == (tmp_path / f"carme/native/carme-{platform.machine()}").read_bytes()


def test_the_documentation_goes_with_the_portal(tmp_path: Path) -> None:
    """Its links to folders of the source tree are followed: a host gets no more than the part."""
    packed = json.loads(pack(ANSIBLE.parent, tmp_path / "out", "webui").stdout)["webui"]
    with tarfile.open(packed["archive"]) as archive:
        inside = {entry.name: entry for entry in archive.getmembers()}
    documentation = "webui/src/carme_webui/documentation"
    for page in (ANSIBLE.parent / "docs/users").glob("*.md"):
        assert inside[f"{documentation}/users/{page.name}"].isreg()
    assert inside[f"{documentation}/pictures/session.png"].isreg()
    assert not [name for name, entry in inside.items() if not entry.isreg()]


def test_a_missing_part_is_named(source: Path, tmp_path: Path) -> None:
    done = pack(source, tmp_path / "out", "carme", "webui")
    assert done.returncode == 1
    assert "has no folder webui" in done.stderr
    assert not (tmp_path / "out").exists()


def test_secrets_are_made_once_and_their_modes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = load("secrets", "make_secrets")
    me = grp.getgrgid(os.getgid())
    monkeypatch.setattr(secrets.grp, "getgrnam", lambda name: me)
    monkeypatch.setattr(secrets.os, "chown", lambda *arguments: None)
    monkeypatch.setattr(secrets, "OWNER", os.getuid())
    directory = tmp_path / "secrets"
    directory.mkdir(mode=0o755)
    table = [{"name": "token", "kind": "hex", "group": "any"}, {"name": "key", "kind": "rsa", "group": "any"}]
    assert set(secrets.main(directory, table)) == {str(directory), "token", "key"}
    token, key = (directory / "token").read_text(), (directory / "key").read_text()
    assert len(bytes.fromhex(token.strip())) == 32
    assert key.startswith("-----BEGIN PRIVATE KEY-----")
    assert secrets.main(directory, table) == []
    (directory / "token").chmod(0o644)
    assert secrets.main(directory, table) == ["token"]
    assert (directory / "token").stat().st_mode & 0o777 == 0o640
    assert (directory / "token").read_text() == token


@pytest.mark.parametrize(("mode", "fits"), [(0o400, True), (0o600, True), (0o440, False), (0o604, False)])
def test_a_munge_key_is_for_munge_alone(
    mode: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's package makes it 0600, our role 0400; both are right."""
    check_host = load("validation", "check_host")
    me = check_host.pwd.getpwuid(os.getuid())
    munge = type(me)(("munge", *me[1:]))
    monkeypatch.setattr(check_host.pwd, "getpwuid", lambda uid: munge)
    key = tmp_path / "munge.key"
    key.write_bytes(b"x")
    key.chmod(mode)
    if fits:
        assert check_host.munge_key(key) == f"{mode:04o} munge"
    else:
        with pytest.raises(check_host.Wrong, match=f"{mode:04o}"):
            check_host.munge_key(key)


def test_a_check_says_what_it_found_and_what_to_do(tmp_path: Path) -> None:
    check_host = load("validation", "check_host")
    wanted = {"head": False, "host": "n1", "units": [], "stopped": []}
    wanted |= {"images": str(tmp_path), "default_image": "torch"}
    result = {check["name"]: check for check in check_host.main(wanted)}["image"]
    assert (result["ok"], result["host"]) == (False, "n1")
    assert "torch.sif is missing" in result["detail"]
    assert "--tags images" in result["remedy"]
    for name in ("torch.sif", "torch.json"):
        (tmp_path / name).write_text("x")
    assert {check["name"]: check for check in check_host.main(wanted)}["image"]["ok"] is True
    # A controller of Slurm alone has none.
    assert not [check for check in check_host.main(wanted | {"images": ""}) if check["name"] == "image"]


@pytest.mark.parametrize(
    ("states", "ok", "words"),
    [
        ("inactive failed", True, "2 units stopped"),
        ("inactive active", False, "On a standby run: carme-hub."),
        ("activating inactive", False, "On a standby run: carme-broker."),
        ("", False, "systemd does not say what"),
    ],
)
def test_a_standby_runs_no_service_of_carme(
    states: str, ok: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_host = load("validation", "check_host")
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' {states}\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    wanted = {"head": False, "host": "head-2", "units": [], "images": ""}
    found = check_host.main(wanted | {"stopped": ["carme-broker", "carme-hub"]})
    (result,) = (check for check in found if check["name"] == "standby")
    assert (result["ok"], words in result["detail"]) == (ok, True)


def test_the_check_knows_the_same_secrets_as_the_role_that_makes_them() -> None:
    check_host = load("validation", "check_host")
    table = (ANSIBLE / "roles/secrets/vars/main.yml").read_text()
    assert all(f"name: {name}," in table for name in check_host.GROUPS)
    assert table.count("kind:") == len(check_host.GROUPS)


SPARES_ALL = 2**31


@pytest.fixture
def node(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the prolog or the epilog as the role writes it, with the folders of a node below `tmp_path`."""
    (tmp_path / "images").mkdir()
    loader = jinja2.FileSystemLoader(ANSIBLE / "roles/job_hooks/templates")
    templates = jinja2.Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True)
    values = {
        "job_hooks_required_mounts": [],
        "carme_images_directory": tmp_path / "images",
        "carme_allocations": tmp_path / "allocations",
        "carme_staging_cache": tmp_path / "cache",
        "carme_venv": tmp_path / "venv",
        "job_hooks_epilog_seconds": 60,
    }

    def run(
        name: str, minimum_uid: int = SPARES_ALL, beeond: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / name
        text = templates.get_template(f"{name}.j2").render(
            values, carme_minimum_uid=minimum_uid, carme_beeond=beeond
        )
        script.write_text(text.replace("/sys/fs/cgroup", str(tmp_path / "cgroup")))
        return subprocess.run(
            ["sh", str(script)], env=environment, capture_output=True, text=True, check=False
        )

    return run


JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_USER": "user1",
    "SLURM_JOB_ACCOUNT": "carme",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_GPUS": "0,2",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
}


def test_what_the_prolog_writes_is_what_the_exporter_reads(
    node: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "allocations").mkdir()
    assert node("prolog", **JOB).returncode == 0
    records = Allocations(tmp_path / "allocations")
    assert records.all() == {
        7: Allocation(7, "user1", "carme", "gpu", gpus=frozenset({0, 2}), uuids=frozenset(), cpus=4)
    }
    assert [path.name for path in (tmp_path / "allocations").iterdir()] == ["7.json"]
    assert node("epilog", **JOB).returncode == 0
    assert records.all() == {}


def test_the_prolog_has_io_counted_where_control_groups_are_of_version_two(
    node: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    scope = tmp_path / "cgroup/system.slice/n1_slurmstepd.scope"
    scope.mkdir(parents=True)
    assert node("prolog", **JOB).returncode == 0
    assert (scope / "cgroup.subtree_control").read_text() == "+io\n"
    job = scope / "job_7"
    assert (job / "cgroup.subtree_control").read_text() == "+io\n"
    assert job.stat().st_mode & 0o777 == 0o755  # the exporter is not root
    (job / "cgroup.subtree_control").unlink()  # the kernel's own files do not keep a group from going
    assert node("epilog", **JOB).returncode == 0
    assert not job.exists()


def test_the_group_that_slurm_names_by_the_run_counts_io_too(
    node: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    scope = tmp_path / "cgroup/system.slice/slurmstepd.scope"
    scope.mkdir(parents=True)
    job = JOB | {"SLURM_JOB_SLUID": "s4CJ2X0QF00000"}
    assert node("prolog", **job).returncode == 0
    groups = [scope / "job_7", scope / "s4CJ2X0QF00000"]
    for group in groups:
        assert (group / "cgroup.subtree_control").read_text() == "+io\n"
        (group / "cgroup.subtree_control").unlink()  # the kernel's own files do not keep a group from going
    assert node("epilog", **job).returncode == 0
    assert [path.name for path in scope.iterdir()] == ["cgroup.subtree_control"]


def test_groups_go_before_what_takes_long_and_those_that_were_busy_after_it(
    node: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Slurm may end an epilog that takes long."""
    scope = tmp_path / "cgroup/system.slice/slurmstepd.scope"
    empty, busy = scope / "job_7", scope / "s4CJ2X0QF00000"
    for folder in (empty, busy / "step", tmp_path / "cache/jobs/7/results", tmp_path / "venv/bin"):
        folder.mkdir(parents=True)
    janitor = tmp_path / "venv/bin/carme-janitor"
    janitor.write_text(f"#!/bin/sh\nls {scope} >{tmp_path}/seen\nrmdir {busy}/step\n")
    janitor.chmod(0o755)
    assert node("epilog", **JOB, SLURM_JOB_SLUID=busy.name).returncode == 0
    assert (tmp_path / "seen").read_text().split() == [busy.name]
    assert list(scope.iterdir()) == []


def test_jobs_start_on_a_kernel_that_counts_no_io(
    node: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    refused = tmp_path / "cgroup/system.slice/slurmstepd.scope/cgroup.subtree_control"
    refused.mkdir(parents=True)  # writing it is an error for everybody, root included
    done = node("prolog", **JOB)
    assert (done.returncode, done.stdout) == (0, "")
    assert not (refused.parent / "job_7").exists()


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"SLURM_JOB_GPUS": ""}, {"gpus": frozenset()}),
        ({"SLURM_JOB_GPUS": "MIG-1a-2b,1"}, {"gpus": frozenset({1}), "uuids": frozenset({"MIG-1a-2b"})}),
        ({"SLURM_JOB_CPUS_PER_NODE": "4,8"}, {"cpus": None}),
        ({"SLURM_JOB_CPUS_PER_NODE": "16"}, {"cpus": 16}),
        ({"SLURM_JOB_ACCOUNT": 'a"b\\c\n$(id)'}, {"account": "abc$(id)"}),
    ],
)
def test_odd_allocations_are_written_as_json_too(
    node: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    change: dict[str, str],
    wanted: dict[str, object],
) -> None:
    (tmp_path / "allocations").mkdir()
    assert node("prolog", **JOB | change).returncode == 0
    found = Allocations(tmp_path / "allocations").all()[7]
    assert {name: getattr(found, name) for name in wanted} == wanted


def test_no_job_fails_because_its_record_cannot_be_written(
    node: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert node("prolog", **JOB).returncode == 0  # no exporter: no folder
    assert not (tmp_path / "allocations").exists()
    (tmp_path / "allocations/.7.new").mkdir(parents=True)
    assert node("prolog", **JOB).returncode == 0
    assert not (tmp_path / "allocations/7.json").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="an epilog is root's")
def test_an_epilog_ends_what_its_job_left_behind_and_nothing_else(
    node: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    # Every program that it starts is one more for each process of the node, times the jobs that end together.
    stat = tmp_path / "bin/stat"
    stat.parent.mkdir()
    stat.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\nexec /usr/bin/stat "$@"\n')
    stat.chmod(0o755)
    number = str(10**9 + os.getpid())

    def left(user: int, **environment: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["/bin/sleep", "600"], user=user, env=environment, cwd="/")

    processes = {
        "its": left(54321, SLURM_JOB_ID=number),
        "another job's": left(54321, SLURM_JOB_ID=number + "0"),
        "of a name like it": left(54321, OLD_SLURM_JOB_ID=number),
        "root's": left(0, SLURM_JOB_ID=number),
    }
    try:
        path = f"{stat.parent}:/usr/bin:/bin"
        assert node("epilog", minimum_uid=1000, PATH=path, SLURM_JOB_ID=number).returncode == 0
        assert processes["its"].wait(HANG) == -9
        assert [name for name, process in processes.items() if process.poll() is None] == [
            "another job's", "of a name like it", "root's",
        ]  # fmt: skip
        calls = (tmp_path / "calls").read_text().splitlines()
        assert len(calls) < 12, "not a program for each process of the node"
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("constraints", "starts"),
    [
        ("beeond", True),
        ("fast&beeond", True),
        ("[a|beeond*2]", True),
        ("", False),
        ("nobeeond", False),
        ("beeond2", False),
    ],
)
def test_jobs_that_ask_for_it_get_a_file_system_over_their_nodes(
    node: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, constraints: str, starts: bool
) -> None:
    program = tmp_path / "venv/bin/carme-beeond"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\nexit 1\n')
    program.chmod(0o755)
    job = JOB | {
        "SLURM_JOB_CONSTRAINTS": constraints, "SLURM_JOB_UID": "1001", "SLURM_JOB_NODELIST": "n[1-2]",
        "PATH": "/usr/bin:/bin",
    }  # fmt: skip
    # The job itself reports the missing file system; the node must not be drained for that.
    assert node("prolog", beeond="/mnt/beeond", **job).returncode == 0
    calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    assert calls == ("start --job 7 --uid 1001 --nodes n[1-2]\n" if starts else "")
    assert node("prolog", **job).returncode == 0
    (tmp_path / "cache/beeond").mkdir(parents=True)
    (tmp_path / "cache/beeond/7.status").touch()
    assert node("epilog", beeond="/mnt/beeond", **job).returncode == 0
    assert (tmp_path / "calls").read_text() == f"{calls}stop --job 7\n"


def test_slurmd_is_started_by_the_oldest_python_that_is_promised() -> None:
    # Newer ones can leave a namespace by themselves; what stops this one is the kernel alone.
    program = ANSIBLE / "roles/slurm_node/files/carme-slurmd"
    start = "import os, runpy, sys; vars(os).pop('unshare', None); sys.argv = ['slurmd', '/bin/echo', 'up']; "
    start += f"runpy.run_path({str(program)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "up\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_partition_has_is_read_from_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_host = load("validation", "check_host")
    lines = [
        "gpu-01 gpu:a100:4(S:0-1) idle",
        "gpu-02 gpu:a100:2(S:0,1),gpu:h200:1,shard:8 mixed-",
        "cpu-01 (null) drained",
    ]
    (tmp_path / "out").write_text("\n".join(lines) + "\n")
    (tmp_path / "sinfo").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\ncat {tmp_path}/out\n')
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert check_host.partition_nodes("gpu") == [
        {"name": "gpu-01", "gpus": 4, "usable": True, "awake": True},
        {"name": "gpu-02", "gpus": 3, "usable": True, "awake": True},
        {"name": "cpu-01", "gpus": 0, "usable": False, "awake": True},
    ]
    assert "--partition=gpu" in (tmp_path / "asked").read_text()
    assert check_host.node_gpus("gpu") == {"gpu-01": 4, "gpu-02": 3}
    (tmp_path / "out").write_text(lines[2])
    with pytest.raises(check_host.Wrong, match="has no node at work"):
        check_host.partition_nodes("cpu")


def test_the_head_asks_slurm_for_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_host, seen = load("validation", "check_host"), []
    nodes = [{"name": f"gpu-{number}", "gpus": number, "usable": True, "awake": True} for number in range(2)]
    monkeypatch.setattr(check_host, "partition_nodes", lambda name: nodes)
    monkeypatch.setattr(check_host, "nodes", lambda names: seen.append(names) or "at work")
    monkeypatch.setattr(check_host, "gpus", lambda *words: seen.append(words) or "apart")
    wanted = {"head": True, "host": "head", "units": [], "stopped": [], "images": "", "address": "127.0.0.1"}
    wanted |= {"users": ["ada"], "partition": "gpu", "account": "research", "gpus": True, "closed": []}
    wanted |= {"site_port": 1, "hub_port": 1, "secrets": str(tmp_path)}
    assert {"nodes", "gpus"} <= {check["name"] for check in check_host.main(wanted) if check["ok"]}
    assert seen == [["gpu-0", "gpu-1"], ("ada", {"gpu-1": 1}, "gpu", "research")]
