"""Carme can be taken away: all that the roles make is named, and what they changed gets back what it held."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from install_page import EXPORTERS_GROUP, processes_line

from .conftest import Playbook, show, shown

ANSIBLE = Path(__file__).resolve().parents[3] / "ansible"
ROLES = ANSIBLE / "roles"
TABLE: dict[str, Any] = yaml.safe_load((ROLES / "removal/vars/main.yml").read_text())
#: They make what hosts share, which stays: mounts, BeeGFS, users of the site.
SHARED = {"storage", "beegfs", "users", "removal"}
#: Named by the site, or only while a role runs.
UNLISTED = ("/etc/apt/sources.list.d/", "/etc/apt/preferences.d/", "/var/log/carme/validation.json")


def variables() -> dict[str, Any]:
    """The layout of an installed site, as the role carme has it."""
    known = {"ansible_facts": {"os_family": "Debian"}}
    for role in ("carme", "job_hooks", "images", "prometheus", "portal", "heads", "removal"):
        for kind in ("defaults", "vars"):
            file = ROLES / role / kind / "main.yml"
            known |= yaml.safe_load(file.read_text()) or {} if file.exists() else {}
    return known


VARIABLES = variables()


def rendered(text: str, **more: Any) -> str:
    """Fill in the known variables of a path; unknown ones stay as they are."""
    environment = jinja2.Environment(undefined=jinja2.DebugUndefined)
    environment.filters |= {"basename": lambda text: text.rsplit("/")[-1], "dirname": str}
    for _round in range(4):
        if "{{" not in text:
            break
        try:
            text = environment.from_string(text).render(VARIABLES | more)
        except jinja2.TemplateError:
            break
    return text


def tasks(role: Path) -> Iterator[dict[str, Any]]:
    """The tasks of a role, those of blocks too."""

    def flat(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for task in found:
            yield from flat(task["block"]) if "block" in task else [task]

    for file in sorted(role.glob("tasks/*.yml")):
        yield from flat(yaml.safe_load(file.read_text()) or [])


def created_paths(role: Path) -> Iterator[str]:
    """The paths of files, folders and links that a role's tasks make."""
    for task in tasks(role):
        loop = task.get("loop")
        items = loop if isinstance(loop, list) else VARIABLES.get(str(loop).strip("{} "), [None])
        for module, values in task.items():
            if module in ("ansible.builtin.template", "ansible.builtin.copy"):
                paths = [values["dest"]]
            elif module == "ansible.builtin.file" and values.get("state") in ("directory", "link"):
                paths = [values["path"]]
            elif module == "ansible.builtin.shell":
                paths = re.findall(r">(/(?:etc|usr)/\S+)", values["cmd"])
            else:
                continue
            for item in items if isinstance(items, list) else [None]:
                for path in paths:
                    yield rendered(path, **({} if item is None else {"item": item}))


def is_below(path: str, folders: list[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def named() -> list[str]:
    """The paths that the table removes, restores or leaves."""
    stored = [name for names in TABLE["removal_kept"].values() for name in names if name.startswith("/")]
    changed = [entry["path"] for entry in TABLE["removal_changed_files"]]
    data = [rendered(path) for path in TABLE["removal_data_paths"]]
    data += [rendered(path) for path in TABLE["removal_parents"]]
    units = [*TABLE["removal_units"], *TABLE["removal_unit_templates"]]
    return [
        *TABLE["removal_paths"],
        *data,
        *changed,
        *stored,
        *(f"/etc/systemd/system/{entry}" for entry in (*units, *TABLE["removal_unit_folders"])),
    ]


@pytest.mark.parametrize(
    "role", sorted(path for path in ROLES.iterdir() if path.name not in SHARED), ids=lambda role: role.name
)
def test_every_file_that_a_role_makes_is_named(role: Path) -> None:
    missing = [
        path
        for path in created_paths(role)
        if path.startswith("/") and not is_below(path.rstrip("/"), named()) and not path.startswith(UNLISTED)
    ]
    assert missing == []


def test_the_scan_finds_what_roles_make() -> None:
    """Otherwise the test above would pass without checking anything."""
    found = {path for role in ROLES.iterdir() if role.name not in SHARED for path in created_paths(role)}
    assert {
        "/etc/systemd/system/carme-broker.service",
        "/etc/systemd/system/carme-worker.service",
        "/usr/libexec/carme/prolog",
        "/usr/local/bin/carme",
        "/etc/profile.d/carme.sh",
        "/usr/lib/sysusers.d/carme.conf",
    } <= found


def test_every_unit_account_and_folder_is_named() -> None:
    templates = {file.name.removesuffix(".j2") for file in ROLES.glob("*/templates/carme-*.*.j2")}
    units = {name for name in templates if name.endswith((".service", ".timer"))}
    units |= {f"{unit['name']}.service" for unit in VARIABLES["portal_units"]}
    assert units == {*TABLE["removal_units"], *TABLE["removal_unit_templates"]}
    accounts = (ROLES / "base/templates/sysusers.conf.j2").read_text()
    removed = {rendered(name) for name in (*TABLE["removal_accounts"], *TABLE["removal_groups"])}
    assert {rendered(name) for name in re.findall(r"^[ug] (\{\{.*?\}\})", accounts, re.MULTILINE)} == removed
    folders = (ROLES / "base/templates/tmpfiles.conf.j2").read_text()
    paths = [rendered(path) for path in re.findall(r"^[df] (\{\{.*?\}\}\S*|\S+) ", folders, re.MULTILINE)]
    assert paths and [path for path in paths if not is_below(path, named())] == []


@pytest.mark.parametrize("family", ["Debian", "RedHat"])
def test_every_package_goes_or_stays_for_a_reason(family: str) -> None:
    components = yaml.safe_load((ROLES / f"base/vars/{family}.yml").read_text())["base_packages_by_component"]
    wanted = {name for names in components.values() for name in names}
    gone = set(TABLE["removal_package_names"][family])
    saved = {name for names in TABLE["removal_kept"].values() for name in names}
    assert wanted <= gone | saved and not gone & saved
    # Jobs go on.
    slurm = [names for component, names in components.items() if component.startswith(("slurm", "munge"))]
    assert not gone & {name for names in slurm for name in names}


@pytest.mark.parametrize(
    ("line", "stops"),
    [
        ("Prolog=/usr/libexec/carme/prolog", True),
        ("/usr/libexec/carme/prolog || exit 1", True),
        ("[ ! -x /usr/libexec/carme/prolog ] || /usr/libexec/carme/prolog || exit 1", False),
        ("  # /usr/libexec/carme/prolog was called here", False),
        ("exit 0", False),
    ],
)
def test_only_a_line_that_would_fail_stops_a_removal(line: str, stops: bool, tmp_path: Path) -> None:
    (tmp_path / "prolog.sh").write_text(f"#!/bin/sh\n{line}\n")
    check = next(task for task in tasks(ROLES / "removal") if "still calls" in task["name"])
    assert check["ansible.builtin.script"]["cmd"].endswith("/files/find_callers.py /etc/slurm")
    assert bool(callers(tmp_path, tmp_path)) == stops


@pytest.mark.parametrize(
    ("line", "stops"),
    [
        (processes_line(), True),
        ("proc\t/proc\tproc\tgid=carme-exporter,hidepid=2\t0\t0", True),
        (processes_line().replace(EXPORTERS_GROUP, ""), False),
        ("proc /proc proc hidepid=2,gid=carme-exporters 0 0", False),
        (f"# {processes_line()}", False),
        ("", False),
    ],
)
def test_a_mount_that_the_next_boot_could_not_do_stops_a_removal(
    line: str, stops: bool, tmp_path: Path
) -> None:
    (tmp_path / "fstab").write_text(f"/dev/vda / ext4 defaults 0 1\n{line}\n")
    check = next(
        task for task in tasks(ROLES / "removal") if task["name"] == "Look how the next boot mounts /proc"
    )
    command = [*check["ansible.builtin.command"]["argv"], "--tab-file", tmp_path / "fstab"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1), found.stderr
    stop = next(task for task in tasks(ROLES / "removal") if "processes of others" in task["name"])
    environment = jinja2.Environment()
    environment.tests["search"] = lambda text, pattern: bool(re.search(pattern, text))
    passes = environment.compile_expression(stop["ansible.builtin.assert"]["that"])
    known = {"removal_proc": {"stdout": found.stdout}, "carme_exporter_account": "carme-exporter"}
    assert passes(**known) == (not stops)


def callers(folder: Path, *looked_at: Path, config: str = "") -> list[str]:
    """What calls Carme's prolog or epilog; `config` is what Slurm answers, nothing where it is away."""
    answer = folder / "config.txt"
    answer.write_text(config)
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/scontrol").write_text(f"#!/bin/sh\ntest -s '{answer}' && cat '{answer}'\n")
    (folder / "bin/scontrol").chmod(0o755)
    command = [sys.executable, ROLES / "removal/files/find_callers.py", *looked_at]
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["callers"]


def test_a_prolog_that_lies_elsewhere_stops_a_removal(tmp_path: Path) -> None:
    """A node is drained by a prolog that fails, wherever it lies."""
    for name in ("usual", "other", "site", "parts"):
        (tmp_path / name).mkdir()
    prolog, epilog = tmp_path / "site/prolog", tmp_path / "site/epilog"
    prolog.write_text("#!/bin/sh\n/usr/libexec/carme/prolog || exit 1\n")
    epilog.write_text("#!/bin/sh\n[ ! -x /usr/libexec/carme/epilog ] || /usr/libexec/carme/epilog\n")
    (tmp_path / "parts/10-carme").symlink_to("/usr/libexec/carme/epilog")
    (tmp_path / "other/slurm.conf").write_text(f"Prolog={prolog}\nTaskProlog=/usr/libexec/carme/prolog\n")
    settings = f"Prolog = {prolog}\nEpilog = {epilog}\nSLURM_CONF = {tmp_path}/other/slurm.conf\n"
    several = f"Epilog[0]               = {epilog}\nEpilog[1]  = {tmp_path}/parts/*\nProlog = (null)\n"
    found = str(tmp_path / "other/slurm.conf"), str(prolog)
    assert callers(tmp_path, tmp_path / "usual", config=settings) == [*found]
    assert callers(tmp_path, tmp_path / "usual", config=several) == [str(tmp_path / "parts/10-carme")]
    assert callers(tmp_path, tmp_path / "usual", config="Epilog = /usr/libexec/carme/epilog\n") == [
        "/usr/libexec/carme/epilog"
    ]
    # Slurm does not answer: what lies in the usual place is known all the same.
    assert callers(tmp_path, tmp_path / "usual") == []
    assert callers(tmp_path, tmp_path / "parts") == [str(tmp_path / "parts/10-carme")]


def restore(*paths: Path) -> list[str]:
    script = ROLES / "removal/files/restore_files.py"
    done = subprocess.run([sys.executable, script, *paths], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["restored"]


def test_the_oldest_backup_comes_back(tmp_path: Path) -> None:
    changed, unchanged = tmp_path / "nginx.conf", tmp_path / "redis.conf"
    changed.write_text("ours, changed twice")
    Path(f"{changed}.4711.2026-11-02@10:00:00~").write_text("ours")
    Path(f"{changed}.99.2026-11-01@10:00:00~").write_text("the site's")
    Path(f"{changed}.99.2026-11-01@10:00:00~").chmod(0o640)
    (tmp_path / "nginx.conf.old~").write_text("an editor's")
    unchanged.write_text("never changed")
    assert restore(changed, unchanged, tmp_path / "missing") == [str(changed)]
    assert changed.read_text() == "the site's" and changed.stat().st_mode & 0o777 == 0o640
    assert unchanged.read_text() == "never changed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nginx.conf", "nginx.conf.old~", "redis.conf"]
    assert restore(changed, unchanged) == []


def run_with_mounts(folder: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a task's shell where what is called `mounted...` counts as mounted."""
    program = folder / "bin/mountpoint"
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\ncase $2 in */mounted*) ;; *) exit 1 ;; esac\n")
    program.chmod(0o755)
    environment["PATH"] = f"{program.parent}:/usr/bin:/bin"
    return subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)


def shell_of(name: str, **known: Any) -> str:
    task = next(task for task in tasks(ROLES / "removal") if task["name"] == name)
    environment = jinja2.Environment()
    environment.filters["bool"] = bool
    return environment.from_string(task["ansible.builtin.shell"]["cmd"]).render(known)


def test_only_files_of_carme_are_removed_from_a_mounted_folder(tmp_path: Path) -> None:
    """Images lie on a share as a rule, which cannot be removed and may hold the site's own."""
    remaining = ["mounted-images/own.sif", "mounted-images/notes.json"]
    remaining += ["mounted-images/more/x", "mounted-sets/readme"]
    gone = ["mounted-images/base.sif", "mounted-images/base.json", "mounted-sets/mnist.json"]
    gone += ["mounted-cache/wheels"]
    for name in (*remaining, *gone, "plain/x", "manual/carme-run.1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "mounted-link").symlink_to("mounted-images")
    names = ["mounted-images", "mounted-sets", "mounted-cache", "plain", "manual/carme*.1", "missing"]
    words = [str(tmp_path / name) for name in (*names, "mounted-link")]
    command = shell_of(
        "Find what Carme has made",
        removal_paths=words[4:],
        removal_data_paths=words[:4],
        removal_data=True,
        carme_images_directory=words[0],
        carme_datasets_directory=words[1],
    )
    found = run_with_mounts(tmp_path, command)
    assert found.returncode == 0, found.stderr
    wanted = [*gone, "plain", "manual/carme-run.1", "mounted-link"]
    assert sorted(found.stdout.split()) == sorted(str(tmp_path / name) for name in wanted)


def test_folders_of_units_go_where_nothing_is_left_in_them(tmp_path: Path) -> None:
    for name in ("carme-hub.service.d", "carme-portal.service.d", "nginx.service.d", "ssh.service.d"):
        (tmp_path / name).mkdir()
    (tmp_path / "carme-portal.service.d/override.conf").write_text("of the site")
    task = next(task for task in tasks(ROLES / "removal") if "folders for changes to units" in task["name"])
    environment = jinja2.Environment()
    environment.filters["regex_replace"] = lambda text, pattern, new: re.sub(pattern, new, text)
    command = environment.from_string(task["ansible.builtin.shell"]["cmd"]).render(TABLE)
    command = command.replace("/etc/systemd/system", str(tmp_path))
    for gone in (["carme-hub.service.d", "nginx.service.d"], []):
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(tmp_path / name) for name in gone]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["carme-portal.service.d", "ssh.service.d"]


def test_a_second_removal_changes_nothing() -> None:
    """No task says that it has changed something, or starts a service again, where nothing had to change."""
    found = {task["name"]: task for task in tasks(ROLES / "removal")}
    assert not [name for name, task in found.items() if task.get("changed_when") is True]
    always = [
        task.get("when", "")
        for task in found.values()
        if task.get("ansible.builtin.systemd_service", {}).get("state") in ("reloaded", "restarted")
    ]
    assert len(always) == 2 and all("is changed" in when or ".restored" in when for when in always)
    drops = found["Remove the portal's database from PostgreSQL"]
    changed = jinja2.Environment().compile_expression(drops["changed_when"])
    notice = 'NOTICE:  database "carme-portal" does not exist, skipping'
    assert not changed(removal_dropped={"stderr": notice}) and changed(removal_dropped={"stderr": ""})


def test_services_forget_carme_before_anything_else_can_fail() -> None:
    """The next run finds no files to take away, so it would neither reload nor restart them."""
    names = [task["name"] for task in tasks(ROLES / "removal")]
    applied = ["Have nginx serve what is left", "Have others use their own configuration again"]
    later = ["Remove the portal's database from PostgreSQL", "Remove the accounts of Carme's services"]
    assert max(map(names.index, applied)) < min(map(names.index, later))
    assert names.index("Take it away") + 1 == names.index(applied[0])


def test_notices_of_the_server_are_read_in_english() -> None:
    found = {task["name"]: task for task in tasks(ROLES / "removal")}
    environment = found["Remove the portal's database from PostgreSQL"]["environment"]
    assert environment["PGOPTIONS"] == "-c lc_messages=C"


def test_the_welcome_page_comes_back_only_where_carme_took_it() -> None:
    found = {task["name"]: task for task in tasks(ROLES / "removal")}
    back = jinja2.Environment().compile_expression(found["Give nginx its welcome page back"]["when"])
    welcome = {"carme_heads": ["portal"], "removal_welcome": {"stat": {"exists": True}}}
    for host, sites, wanted in (("portal", 0, True), ("portal", 1, False), ("gpu-01", 0, False)):
        known = welcome | {"inventory_hostname": host, "removal_sites": {"matched": sites}}
        assert bool(back(**known)) == wanted
    find = found["See whether nginx has other sites"]["ansible.builtin.find"]
    assert "/etc/nginx/conf.d" in find["paths"] and "carme.conf" in find["excludes"]


def test_empty_parents_go_and_mounts_stay(tmp_path: Path) -> None:
    for name in ("empty", "full/x", "mounted"):
        (tmp_path / name).mkdir(parents=True)
    command = shell_of("Take their parents away where nothing is left in them")
    printed = {}
    for name in ("empty", "full", "mounted", "missing"):
        done = run_with_mounts(tmp_path, command, parent=str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        printed[name] = done.stdout.strip()
    assert printed == {"empty": str(tmp_path / "empty"), "full": "", "mounted": "", "missing": ""}
    assert (tmp_path / "mounted").is_dir() and not (tmp_path / "empty").exists()


def test_units_that_a_host_does_not_have_take_no_time(
    playbook: Playbook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each unit would be one call per host, and a compute node has five of twenty."""
    program = tmp_path / "systemctl"
    program.write_text(
        "#!/bin/sh\nfor unit in carme-janitor.timer carme-broker.service carme-home@.service; do\n"
        '  case " $* " in *" $unit "*) echo "$unit enabled enabled" ;; esac\ndone\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    names = ("See which units are there", "Stop Carme's services", "Take the units away")
    check, stop, take = (task for task in tasks(ROLES / "removal") if task["name"] in names)
    loops = show(f"[{stop['loop'].strip('{} ')}, {take['loop'].strip('{} ')}]")
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(ROLES / "removal/vars/main.yml")],
        "tasks": [check, loops],
    }
    file = tmp_path / "playbook.yml"
    file.write_text(yaml.safe_dump([play]))
    ((stopped, gone),) = shown(playbook("-i", "localhost,", file))["localhost"]
    assert stopped == ["carme-broker.service", "carme-janitor.timer"]
    assert sorted(gone) == ["carme-broker.service", "carme-home@.service", "carme-janitor.timer"]


def test_only_folders_of_carme_are_removed_below_a_folder_of_the_site() -> None:
    """Nodes' disks hold more than data of jobs."""
    known = {"carme_staging_cache": "/local", "carme_beeond": "/local", "images_cache": "/cache"}
    paths = [rendered(path, **known) for path in TABLE["removal_data_paths"]]
    assert {"/local/jobs", "/local/users", "/local/beeond"} <= set(paths) and "/local" not in paths


def test_options_of_the_command_line_count_as_yes_and_no() -> None:
    """Ansible passes values of -e as text, and each text but the empty one is true."""
    text = (ROLES / "removal/tasks/main.yml").read_text()
    assert re.findall(r"\bremoval_(?:data|packages)\b(?! \| bool)", text) == []
    assert len(re.findall(r"\bremoval_(?:data|packages) \| bool", text)) >= 6


def test_folders_that_units_make_are_named() -> None:
    """systemd makes them, and leaves them when the unit goes."""
    places = {"CacheDirectory": "/var/cache", "StateDirectory": "/var/lib", "LogsDirectory": "/var/log"}
    found = set()
    for file in ROLES.glob("*/templates/carme-*.j2"):
        for kind, names in re.findall(r"^(\w+Directory)=([\w/ -]+)$", file.read_text(), re.MULTILINE):
            found |= {f"{places[kind]}/{name}" for name in names.split()} if kind in places else set()
    assert "/var/cache/carme/node-images" in found
    assert [path for path in sorted(found) if not is_below(path, named())] == []
