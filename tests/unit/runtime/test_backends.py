"""What --backend sets for each framework, without the frameworks."""

import json
import re
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from carme.jobs.templates import TEMPLATES
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.members import Member, Members
from carme_runtime.launcher import place
from carme_runtime.launcher.backends import BACKENDS, Variables
from carme_runtime.launcher.dask_scheduler import bound
from carme_runtime.launcher.ray_start import with_port_written
from carme_runtime.launcher.run_setup import Setup

from .conftest import Process, clean_environment

Script = Callable[[str], str]
Launch = Callable[..., Process]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_dry_run_says_what_a_backend_sets_starts_and_stops(
    local: Launch, script: Script, name: str
) -> None:
    code, out, errors = local("--dry-run", "-n", "2", "--backend", name, script("1 / 0")).wait()
    assert (code, errors) == (0, "")
    backend = BACKENDS[name]
    assert f"--backend {name} sets: {', '.join(backend.sets) or 'nothing'}\n" in out
    assert f"starts: {backend.starts}\nstops: {backend.stops}\n" in out


@pytest.mark.parametrize("name", BACKENDS)
def test_a_dry_run_prints_json_for_each_backend(local: Launch, script: Script, name: str) -> None:
    path = script("1 / 0")
    code, out, errors = local("--dry-run", "--json", "-n", "2", "--backend", name, path).wait()
    assert (code, errors) == (0, "")
    answer = json.loads(out)
    assert answer["command"][1:] == [path]
    assert answer["backend"]["name"] == name and answer["backend"]["sets"] == list(BACKENDS[name].sets)
    assert [rank["environment"]["RANK"] for rank in answer["ranks"]] == ["0", "1"][: len(answer["ranks"])]
    for rank in answer["ranks"]:
        for variable in BACKENDS[name].sets:
            found = [each for each in rank["environment"] if each.startswith(variable.rstrip("*"))]
            assert found, f"{variable} is declared but not set"


def test_a_dry_run_says_which_command_is_missing(local: Launch, script: Script, tmp_path: Path) -> None:
    """As it does of modules; what is there is not named."""
    run = ("--dry-run", "--backend", "mpi", script("1 / 0"))
    _, out, _ = local(*run, PATH=str(tmp_path)).wait()
    assert out.endswith("\nlacks: mpirun, which is not on PATH\n")
    (tmp_path / "mpiexec").write_text("")
    (tmp_path / "mpiexec").chmod(0o700)
    _, out, _ = local(*run, PATH=str(tmp_path)).wait()
    assert "lacks" not in out


def test_a_dry_run_counts_workers_of_a_node(local: Launch, script: Script) -> None:
    _, out, _ = local("--dry-run", "-n", "3", "--backend", "dask", script("1 / 0")).wait()
    assert out.startswith("1 rank of: ") and "\nDask's scheduler on " in out
    (line,) = [each for each in out.splitlines() if each.startswith("A worker of Dask on ")]
    assert line.endswith(" (3 times)")


def test_a_dry_run_without_a_backend_prints_json(local: Launch, script: Script) -> None:
    code, out, _ = local("--dry-run", "--json", "-n", "2", "--pin-cpus", script("1 / 0")).wait()
    answer = json.loads(out)
    assert code == 0 and "backend" not in answer
    assert [(rank["rank"], rank["local_rank"]) for rank in answer["ranks"]] == [(0, 0), (1, 1)]
    assert all("cpus" in rank for rank in answer["ranks"])


@pytest.mark.parametrize("options", [[], ["--dry-run", "--cleanup"]])
def test_json_is_for_dry_runs(local: Launch, script: Script, options: list[str]) -> None:
    code, out, errors = local("--json", *options, script("1 / 0")).wait()
    assert (code, out) == (2, "") and "--json is how --dry-run says" in errors


def test_ranks_of_tensorflow_know_each_other(local: Launch, script: Script, tmp_path: Path) -> None:
    for module in BACKENDS["tensorflow"].modules:
        (tmp_path / f"{module}.py").touch()
    path = script("import os; print(os.environ['TF_CONFIG'])")
    folders = f"{clean_environment()['PYTHONPATH']}:{tmp_path}"
    code, out, errors = local("-n", "3", "--backend", "tensorflow", path, PYTHONPATH=folders).wait()
    assert (code, errors) == (0, "")
    reported = [json.loads(line.partition("] ")[2]) for line in out.splitlines()]
    assert sorted(rank["task"]["index"] for rank in reported) == [0, 1, 2]
    workers = reported[0]["cluster"]["worker"]
    assert len(set(workers)) == 3 and all(rank["cluster"]["worker"] == workers for rank in reported)


def test_programs_beside_ranks_leave_no_profile(local: Launch, script: Script, tmp_path: Path) -> None:
    """They would write it in the place of rank 0's: two of MXNet begin by importing it."""
    (tmp_path / "mxnet.py").write_text(
        "import os, pathlib, signal\n"
        "draft = pathlib.Path(os.environ['FOUND'], os.environ['DMLC_ROLE'] + '.new')\n"
        "draft.write_text(os.environ.get('CARME_PROFILE', 'none'))\n"
        "draft.rename(draft.with_suffix(''))\n"
        "if os.environ['DMLC_ROLE'] != 'worker': signal.pause()\n"
    )
    path = script(
        "import mxnet, os, pathlib, time\n"
        "found = pathlib.Path(os.environ['FOUND'])\n"
        "while not all((found / name).exists() for name in ('scheduler', 'server')): time.sleep(0.01)\n"
    )
    folders = f"{clean_environment()['PYTHONPATH']}:{tmp_path}"
    options = ("-n", "1", "--backend", "mxnet", "--profile", str(tmp_path / "profile"))
    code, _, errors = local(*options, path, PYTHONPATH=folders, FOUND=str(tmp_path)).wait()
    assert code == 0, errors
    found = {name: (tmp_path / name).read_text() for name in ("scheduler", "server", "worker")}
    assert found == {"scheduler": "none", "server": "none", "worker": str(tmp_path / "profile")}


def spread(*devices: int, ranks: int | None = None, caller: dict[str, str] | None = None) -> Setup:
    """Nodes n1, n2, ... with so many GPUs; ports are 7000, 7001, ..."""
    nodes = [
        Member(number, f"n{number + 1}", f"10.0.0.{number + 1}", count, 8)
        for number, count in enumerate(devices)
    ]
    places = place(Members.of(nodes, [], len(nodes)), ranks=ranks)
    return Setup(places, [7000 + number for number in range(len(places))], caller or {})


def of(name: str, setup: Setup) -> Variables:
    count = len(BACKENDS[name].ports(setup.places))
    return BACKENDS[name].variables(Setup(setup.places, setup.ports[:count], setup.caller))


def test_jax_takes_ranks_for_tasks_of_slurm() -> None:
    job = {"SLURM_JOB_ID": "17", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}
    created = of("jax", spread(2, 1, caller=job))
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID", "JAX_LOCAL_DEVICE_IDS")
    assert [[created[rank][name] for name in names] for rank in range(3)] == [
        ["0", "0", "3", "17", "0"],
        ["1", "1", "3", "17", "1"],
        ["2", "0", "3", "17", "0"],
    ]
    for variables in created.values():
        assert variables["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:7000"
        assert variables["JAX_COORDINATOR_BIND_ADDRESS"] == "10.0.0.1:7000"
        assert variables["SLURM_STEP_NODELIST"] == "n[1-2]"
        assert "no_grpc_proxy" not in variables
    proxied = of("jax", spread(2, 1, caller={"https_proxy": "http://proxy:3128", "no_proxy": "web"}))
    assert {variables["no_grpc_proxy"] for variables in proxied.values()} == {"web,10.0.0.1,10.0.0.2"}


def test_jax_on_one_node_stays_off_the_network() -> None:
    created = of("jax", spread(0, ranks=2))
    assert {variables["JAX_COORDINATOR_ADDRESS"] for variables in created.values()} == {"127.0.0.1:7000"}
    assert {variables["JAX_LOCAL_DEVICE_IDS"] for variables in created.values()} == {"0"}


def test_ranks_of_jax_with_gpus_of_their_own_number_them_from_0() -> None:
    setup = spread(4)
    created = BACKENDS["jax"].variables(Setup(setup.places[:2], [1], {}, devices_per_rank=2))
    assert [variables["JAX_LOCAL_DEVICE_IDS"] for variables in created.values()] == ["0,1", "0,1"]


def test_lightnings_trainer_gets_its_defaults() -> None:
    created = of("lightning", spread(2, 2, caller={"PL_TRAINER_STRATEGY": "fsdp"}))
    for variables in created.values():
        assert variables["PL_TRAINER_NUM_NODES"] == variables["PL_TRAINER_DEVICES"] == "2"
        assert variables["PL_TRAINER_STRATEGY"] == "fsdp"


@pytest.mark.parametrize(
    ("devices", "no_gpu", "value"), [(0, False, "true"), (2, False, "false"), (0, True, "true")]
)
def test_accelerate_uses_the_processor_where_there_is_no_gpu(devices: int, no_gpu: bool, value: str) -> None:
    setup = spread(devices, devices)
    created = BACKENDS["accelerate"].variables(Setup(setup.places, [], {}, no_gpu=no_gpu))
    assert {variables["ACCELERATE_USE_CPU"] for variables in created.values()} == {value}


def test_deepspeed_counts_ranks_across_nodes() -> None:
    created = of("deepspeed", spread(2, 1))
    names = ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [[created[rank][name] for name in names] for rank in range(3)] == [
        ["2", "0", "2"],
        ["2", "0", "1"],
        ["1", "1", "2"],
    ]


def test_mxnet_has_a_scheduler_and_servers_beside_its_workers() -> None:
    setup = Setup(spread(2, 1).places, [7000])
    created = BACKENDS["mxnet"].variables(setup)
    assert [created[rank]["DMLC_NODE_HOST"] for rank in range(3)] == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
    scheduler, servers = BACKENDS["mxnet"].programs(setup)
    assert (scheduler.hosts, servers.hosts) == (["n1"], ["n1", "n2"])
    own_variables = [process.environment for program in (scheduler, servers) for process in program.processes]
    roles = [variables["DMLC_ROLE"] for variables in (*own_variables, *created.values())]
    assert roles == ["scheduler", "server", "server", "worker", "worker", "worker"]
    for variables in (*own_variables, *created.values()):
        names = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER", "DMLC_NUM_WORKER")
        assert [variables[name] for name in names] == ["10.0.0.1", "7000", "2", "3"]


def test_mxnet_needs_ipv4() -> None:
    nodes = [Member(number, f"n{number + 1}", f"fd00::{number + 1}", 0, 8) for number in range(2)]
    with pytest.raises(CarmeRuntimeError, match="Use one node"):
        BACKENDS["mxnet"].refuses(Setup(place(Members.of(nodes, [], 2)), [7000]))


def test_dasks_workers_share_the_cores_and_gpus_of_their_node() -> None:
    scheduler, *workers = BACKENDS["dask"].programs(Setup(spread(2, 1).places, [7000], secrets={"KEY": "x"}))
    assert scheduler.hosts == ["n1"] and scheduler.command[-2:] == ["10.0.0.1", "7000"]
    assert [
        (program.hosts, program.command[program.command.index("--nthreads") + 1]) for program in workers
    ] == [
        (["n1"], "4"),
        (["n2"], "8"),
    ]
    assert [process.devices for program in workers for process in program.processes] == [
        (0, 1),
        (1, 2),
        (0, 1),
    ]
    for program in (scheduler, *workers):
        for process in program.processes:
            assert process.environment["KEY"] == "x" and "x" not in program.command
            assert process.environment["DASK_SCHEDULER_ADDRESS"] == "tls://10.0.0.1:7000"


def test_dasks_pages_are_an_app_of_a_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where it has apps, and its folder is nobody else's; the next one is not in the way of the first."""
    monkeypatch.setattr("carme_runtime.launcher.dask_pages.importlib.util.find_spec", lambda name: name)
    name = f"test-{secrets.token_hex(4)}"
    session = {
        "SLURM_JOB_ID": name,
        "SLURMD_NODENAME": "n1",
        "JUPYTERHUB_SERVICE_PREFIX": "/jupyter/user/ann/first/",
    }
    link = "DASK_DISTRIBUTED__DASHBOARD__LINK"

    def shown(setup: Setup | None = None) -> tuple[str, str | None]:
        setup = setup or Setup(spread(2).places, [7000], session)
        scheduler = BACKENDS["dask"].programs(setup)[0].processes[0]
        return BACKENDS["dask"].variables(setup)[0][link], scheduler.environment.get("CARME_DASK_PAGES")

    assert shown() == ("", None)
    folder = Path(f"/tmp/carme-{name}")
    try:
        (folder / "apps").mkdir(parents=True)
        (folder / "apps").chmod(0o755)
        assert shown() == ("", None)
        (folder / "apps").chmod(0o700)
        first = ("/jupyter/user/ann/first/app/dask/status", f"{folder}/apps/dask.sock")
        assert shown() == first
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(first[1])
            assert shown() == first  # a run that has ended
            second = first[0].replace("dask", "dask-2"), f"{folder}/apps/dask-2.sock"
            earlier = Setup(spread(2).places, [7000], session)
            assert shown(earlier) == first and shown() == second  # both before either listens
            assert shown(earlier) == first
            del earlier
            listener.listen()
            assert shown() == second
        session["SLURMD_NODENAME"] = "n2"
        assert shown() == ("", None)  # the scheduler is not on the session's node
        session["SLURMD_NODENAME"] = "n1"
        monkeypatch.setattr("carme_runtime.launcher.dask_pages.importlib.util.find_spec", lambda name: None)
        assert shown() == ("", None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_dasks_scheduler_goes_on_without_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bound(str(tmp_path / "none/dask.sock")) is None
    assert "Dask's pages are not shown" in capsys.readouterr().err
    (tmp_path / "dask.sock").write_text("no socket")
    assert bound(str(tmp_path / "dask.sock")) is None
    created = bound(str(tmp_path / "other.sock"))
    assert created
    created.close()


def test_ray_has_one_node_for_each_of_the_job_with_its_processors_and_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("carme_runtime.launcher.ray.importlib.util.find_spec", lambda name: None)
    ports = list(range(7000, 7010))
    setup = Setup(spread(2, 1).places, ports, secrets={"RAY_AUTH_TOKEN": "secret"})
    assert [member.host for member in BACKENDS["ray"].ports(setup.places)] == ["n1"] * 6 + ["n2"] * 4
    assert BACKENDS["ray"].variables(setup)[0]["RAY_ADDRESS"] == "10.0.0.1:7000"
    head, worker = BACKENDS["ray"].programs(setup)
    assert (head.hosts, worker.hosts) == (["n1"], ["n2"])
    assert head.command[-8::2] == worker.command[-8::2] and head.command[-8].endswith("agent-grpc-port")
    assert head.command[-7::2] + worker.command[-7::2] == [str(port) for port in ports[2:]]
    assert head.command[3:-8] == [
        "--head", "--port", "7000", "--include-dashboard", "false", "--node-ip-address", "10.0.0.1",
        "--num-cpus", "8", "--num-gpus", "2",
    ]  # fmt: skip
    assert worker.command[3:-8] == [
        "--address", "10.0.0.1:7000", "--node-ip-address", "10.0.0.2", "--num-cpus", "8", "--num-gpus", "1",
    ]  # fmt: skip
    folders = set()
    for program in (head, worker):
        (process,) = program.processes
        assert process.environment["RAY_AUTH_TOKEN"] == "secret" and "secret" not in program.command
        assert process.environment["RAY_AUTH_MODE"] == "token"
        folders.add(process.environment["CARME_RAY_FOLDER"])
    assert len(folders) == 1 and "secret" not in folders.pop()


def test_the_server_of_rays_clients_has_a_free_port_where_ray_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray starts it where gRPC is installed, on a port that two jobs of a node cannot share."""
    found = {"grpc": object()}
    monkeypatch.setattr("carme_runtime.launcher.ray.importlib.util.find_spec", found.get)
    setup = Setup(spread(2, 1).places, list(range(7000, 7010)))
    head, worker = BACKENDS["ray"].programs(setup)
    assert head.command[head.command.index("--ray-client-server-port") + 1] == "7001"
    assert "--ray-client-server-port" not in worker.command
    found.clear()
    assert "--ray-client-server-port" not in BACKENDS["ray"].programs(setup)[0].command


def test_rays_raylet_finds_the_port_of_an_agent_that_is_slow() -> None:
    written: list[tuple[str, str, int]] = []
    order: list[str] = []

    def start(session_dir: str, node_id: str, dashboard_agent_listen_port: int | None = None) -> str:
        order.append(f"after {len(written)} ports")
        return f"raylet of {node_id}"

    def of_another_version(node: str) -> str:
        return node

    def write(*port: str | int) -> None:
        folder, node, number = port
        written.append((str(folder), str(node), int(number)))

    started = with_port_written(start, write)
    assert started("/tmp/session", node_id="n1", dashboard_agent_listen_port=7000) == "raylet of n1"
    assert written == [("/tmp/session", "n1", 7000)] and order == ["after 1 ports"]
    started("/tmp/session", "n1")
    assert len(written) == 1 and with_port_written(of_another_version, write)("n1") == "n1"


def test_a_ray_that_serves_unauthenticated_peers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"ray": "2.9.3"}
    monkeypatch.setattr("carme_runtime.launcher.ray.importlib.metadata.version", lambda name: versions[name])
    with pytest.raises(CarmeRuntimeError, match=r"Ray 2\.9\.3 asks nobody for a token"):
        BACKENDS["ray"].refuses(spread(1))
    versions["ray"] = "2.60.0"
    BACKENDS["ray"].refuses(spread(1))


def test_a_dry_run_shows_no_secrets(local: Launch, script: Script) -> None:
    _, out, _ = local("--dry-run", "--json", "-n", "2", "--backend", "dask", script("1 / 0")).wait()
    answer = json.loads(out)
    [rank] = answer["ranks"]  # the script runs once
    assert rank["environment"]["WORLD_SIZE"] == "1"
    for name in BACKENDS["dask"].secrets:
        assert rank["environment"][name] == "(a secret of the run)"
    assert [program["name"] for program in answer["backend"]["programs"]] == [
        "Dask's scheduler",
        "A worker of Dask",
    ]


def test_what_lightning_cannot_do_is_refused() -> None:
    with pytest.raises(CarmeRuntimeError, match=r"as many ranks on each node .* here are n1: 2, n2: 1\."):
        BACKENDS["lightning"].refuses(spread(2, 1))
    setup = spread(2, 2)
    with pytest.raises(CarmeRuntimeError, match="Leave --devices-per-rank out"):
        BACKENDS["lightning"].refuses(Setup(setup.places, [], {}, devices_per_rank=1))


def test_what_is_not_installed_is_named(local: Launch, script: Script) -> None:
    code, out, errors = local("-n", "2", "--backend", "jax", script("1 / 0")).wait()
    assert (code, out) == (2, "")
    assert "--backend jax needs jax, which this Python does not have." in errors
    assert "pip install jax" in errors


def test_every_backend_has_a_template_for_batch_jobs() -> None:
    assert TEMPLATES.keys() == BACKENDS.keys()
    for name, template in TEMPLATES.items():
        line = template.script.splitlines()[-1]
        assert line == f"carme-run --backend {name} {template.program}"


def test_every_backend_has_its_line_in_the_documentation() -> None:
    """The table of docs/users/frameworks.md says what BACKENDS says."""
    page = (Path(__file__).parents[3] / "docs" / "users" / "frameworks.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| `")}
    assert list(rows) == [f"`{name}`" for name in BACKENDS]
    for name, backend in BACKENDS.items():
        assert all(f"`{variable}`" in rows[f"`{name}`"] for variable in backend.sets), name
        assert f"| {backend.starts} | {backend.stops} |" in rows[f"`{name}`"], name
        assert f"carme-run --backend {name}" in page
    ran = page.partition("## What ran where")[2]
    assert re.findall(r"^\| (\w+) \|", ran, re.MULTILINE) == list(BACKENDS)


def test_what_keras_3_cannot_do_is_explained() -> None:
    explains = BACKENDS["tensorflow"].explains
    trace = 'File "/env/lib/{}/src/utils/traceback_utils.py"\nValueError: Attempt to convert (PerReplica:{{'
    sentence = explains(trace.format("keras"))
    assert sentence.startswith("Keras 3 cannot train with MultiWorkerMirroredStrategy. Use tf.keras")
    assert not explains(trace.format("tf_keras")) and not explains("ValueError: of the script's own")
    assert not BACKENDS["torch"].explains(trace.format("keras"))
