"""What each suite runs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from suites import core, debian, lint
from suites.arguments import Request
from suites.benchmarks import run_benchmark
from suites.beside import Beside, Role
from suites.demo_hosts import DemoHosts
from suites.environments import (
    prepare_cgroup_v2,
    prepare_frameworks,
    prepare_horovod,
    prepare_models,
    prepare_native,
    prepare_zabbix,
)
from suites.running import ROOT, Runner, call, path_of, show_stage

__all__ = ["Plan", "run_quick_lint", "target_of_site"]

#: Suites that run while the cluster's does, where both are requested: they need no cluster, or have users of
#: their own.
BESIDE_CLUSTER = ("lint", "unit", "browser")
#: The cluster's tests that run beside the others, as the second users.
SECOND_PART = ("tests/cluster/test_bad_input.py", "tests/cluster/test_training_backends.py")
#: The tests of the portal's tables and queries.
ON_POSTGRESQL = (
    *(
        f"tests/unit/webui/test_{name}.py"
        for name in (
            "administration",
            "bookings_at_once",
            "jobs",
            "migrations",
            "own_images",
            "projects",
            "reconcile",
            "upgrade",
        )
    ),
    "tests/unit/webui/test_page_cost.py::test_bookings_are_found_by_indexes_in_a_table_of_many",
    "tests/unit/webui/test_processes.py::test_open_pages_hold_no_connection_to_the_database",
)


def _quick_checks(files: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Checks that take seconds, by their names, each with its command."""
    return {
        "lint: ruff check": ("ruff", "check", "--no-cache", "--force-exclude", *files),
        "lint: ruff format": ("ruff", "format", "--no-cache", "--force-exclude", "--check", *files),
        "lint: names": ("python", "tests/check_names.py"),
    }


def run_quick_lint(files: tuple[str, ...]) -> int:
    """Check these files before a commit; the exit code.

    The results of the last suites stay, and another ./test may be writing its own.
    """
    code = 0
    for name, command in _quick_checks(files).items():
        show_stage(name)
        code |= call(*command) != 0
    return code


def _processes(number: int) -> tuple[str, ...]:
    """Options of pytest: in how many processes it runs tests, unless CARME_PROCESSES names another number.

    Each begins with its own part of the files, so that what a file's tests share is made once, and helps the
    others at the end.

    Args:
        number: As many as keep two processors busy. The unit tests compute for less than half of their time;
            then they wait for programs and pages.
    """
    return "--numprocesses", os.environ.get("CARME_PROCESSES") or str(number), "--dist", "worksteal"


def _pictures() -> dict[str, str]:
    """Where a suite that is requested by name keeps pictures of pages; a whole run has no pictures."""
    return {"CARME_SCREENSHOTS": os.environ.get("CARME_SCREENSHOTS", str(ROOT / "artifacts/screenshots"))}


class Plan:
    """Runs the suites of a request.

    The tests on the cluster mostly wait for it, so that there is a processor meanwhile for all that needs no
    cluster. And for more tests on the cluster: the browser's, and some of the cluster's own, run beside the
    others. They have users of their own, and no test needs more than half of a node. Tests for which that
    does not hold are marked `alone`, and run when the others have ended.

    Args:
        request: What runs.
        runner: Runs commands, and notes how they ended.
        role: Which part this process has.
        python: The interpreter of the tests' environment.
        hosts: The demo's hosts.
    """

    def __init__(self, request: Request, runner: Runner, role: Role, python: Path, hosts: DemoHosts) -> None:
        self._request = request
        self._runner = runner
        self._role = role
        self._python = python
        self._hosts = hosts
        self._beside = Beside(runner, "what runs beside the cluster")
        self._second = Beside(runner, "what the second users do")

    def run(self) -> None:
        """Run the suites in their order.

        Raises:
            Stop: What one needs is missing.
        """
        suites: dict[str, Callable[[], None]] = {
            "lint": self._lint,
            "unit": self._unit,
            "native": self._native,
            "models": self._models,
            "bench": self._bench,
            "cluster": self._cluster,
            "browser": self._browser,
            "security": self._security,
            "monitoring": self._monitoring,
            "frameworks": self._frameworks,
            "end-to-end": self._end_to_end,
            "sites": self._sites,
            "faults": self._faults,
        }
        for suite in self._request.suites:
            if not (suite in BESIDE_CLUSTER and self._request.runs_beside_cluster(suite)):
                suites[suite]()

    def request_end(self) -> None:
        """Request the end of what runs beside, if it is no longer needed."""
        self._beside.request_end()
        self._second.request_end()

    def finish_end(self) -> None:
        """Wait for that end."""
        self._beside.finish_end()
        self._second.finish_end()

    def _pytest(self, name: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        """Run pytest, as a suite of this name."""
        command = [self._python, "-m", "pytest", "-p", "no:cacheprovider", self._runner.junit(name)]
        self._runner.run(name, *command, *arguments, environment=environment)

    def _on_cluster(self, name: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._pytest(name, "--timeout", "900", "--durations", "15", *arguments, environment=environment)

    def _targets(self, folder: str) -> tuple[str, ...]:
        """What pytest runs of a suite, and its arguments.

        That is its folder, unless the first argument names a file of it. Later ones may be an option's value.
        """
        arguments = self._request.arguments
        file = arguments[0].partition("::")[0].removeprefix("./") if arguments else ""
        is_file = file.startswith(f"{folder}/") and (ROOT / file).exists()
        return arguments if is_file else (folder, *arguments)

    def _lint(self) -> None:
        for name, command in _quick_checks((".",)).items():
            self._runner.run(name, *command)
        self._runner.run_steps("lint: pyright", lambda output: lint.pyright(output, self._python))
        self._runner.run_steps("lint: ansible-lint", lint.ansible_lint)
        self._runner.run(
            "lint: documentation",
            *("mkdocs", "build", "--strict", "--site-dir", self._runner.results / "documentation"),
            environment={"NO_MKDOCS_2_WARNING": "1"},
        )

    def _unit(self) -> None:
        debian.prepare_unit()
        self._pytest("unit", *_processes(3), "--durations", "25", *self._targets("tests/unit"))
        if self._request.is_whole and debian.prepare_postgresql():
            name = "unit: on PostgreSQL"
            command = [self._python, "-m", "pytest", "-p", "no:cacheprovider", self._runner.junit(name)]
            database = [self._python, "tests/real_postgresql.py"]
            self._runner.run(name, *database, *command, *_processes(2), *ON_POSTGRESQL)

    def _native(self) -> None:
        native = prepare_native(self._python)
        prepare_horovod(native)
        debian.prepare_otf2()
        python = native / "bin/python"
        runner, suite = self._runner, "native: from Python"
        options = ("--project", "tests/native", "--pythonpath", python, "--level", "error")
        runner.run("native: pyright", "pyright", *options)
        runner.run_steps(
            "native: address and undefined behaviour",
            lambda output: core.sanitized(output, native, "address,undefined"),
        )
        runner.run_steps("native: threads", lambda output: core.sanitized(output, native, "thread"))
        runner.run_steps(
            "native: frames of unauthenticated peers", lambda output: core.fuzzed(output, native)
        )
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", runner.junit(suite)]
        configuration = ["-c", "tests/native/pytest.ini", "--rootdir", "."]
        runner.run(suite, *command, *configuration, *self._targets("tests/native"))

    def _models(self) -> None:
        environment = {"CARME_MODELS": str(prepare_models(self._python))} | path_of("containers/runtime/src")
        options = ["-p", "no:randomly", "-c", "tests/native/pytest.ini", "--rootdir", "."]
        self._pytest("models", *options, *self._targets("tests/models"), environment=environment)

    def _bench(self) -> None:
        request = self._request
        run_benchmark(self._runner, self._hosts, self._python, request.benchmark, request.arguments)

    def _cluster(self) -> None:
        debian.prepare_compiler()
        beside = [suite for suite in ("lint", "unit") if self._request.runs_beside_cluster(suite)]
        has_browser = self._request.runs_beside_cluster("browser")
        if "unit" in beside:
            debian.prepare_unit()
            debian.prepare_postgresql()
        if has_browser:
            debian.prepare_chromium()
        if beside:
            # Before the hosts are up: setting them up leaves a third of two processors idle.
            title = "What needs no cluster begins beside it; its output comes after it"
            self._beside.begin(f"{title}: {' '.join(beside)}", Role.GIVES_WAY, *beside)
        self._hosts.bring_up("cluster")
        if has_browser:
            self._cluster_and_browser()
        else:
            self._on_cluster("cluster", *self._targets("tests/cluster"))
        self._beside.finish()

    def _cluster_and_browser(self) -> None:
        title = (
            "The browser's tests and others of the second users begin beside it; their output comes after it"
        )
        self._second.begin(title, Role.SECOND_USERS, "browser")
        left_out = [f"--ignore={file}" for file in SECOND_PART]
        self._on_cluster("cluster", "-m", "not alone", *left_out, "tests/cluster")
        self._second.finish()
        self._on_cluster("cluster and browser: alone", "-m", "alone", "tests/cluster", "tests/browser")

    def _browser(self) -> None:
        if self._role is Role.SECOND_USERS:
            self._on_cluster("browser", "-m", "not alone", "tests/browser")
            second_users = {"CARME_SECOND_USERS": "yes"}
            name = "cluster: second users"
            self._on_cluster(name, "-m", "not alone", *SECOND_PART, environment=second_users)
            return
        debian.prepare_chromium()
        self._hosts.bring_up("browser")
        self._on_cluster("browser", *self._targets("tests/browser"), environment=_pictures())

    def _on_demo(self, suite: str, *options: str, environment: dict[str, str] | None = None) -> None:
        self._pytest(
            suite, *options, *self._targets(f"tests/{suite.replace('-', '_')}"), environment=environment
        )

    def _security(self) -> None:
        # The site's own check, which the cluster's suite runs, has made the attacks already.
        if not (self._runner.results / "attacks.json").exists():
            self._hosts.bring_up("security")
        self._on_demo("security", "--timeout", "900")

    def _monitoring(self) -> None:
        prepare_zabbix(self._python)
        prepare_cgroup_v2(self._python)
        self._hosts.bring_up("monitoring")
        self._on_demo("monitoring", "--timeout", "900", environment=_pictures())

    def _frameworks(self) -> None:
        self._hosts.bring_up("frameworks")
        self._on_demo("frameworks", "-rs", environment={"CARME_FRAMEWORKS": prepare_frameworks(self._python)})

    def _end_to_end(self) -> None:
        debian.prepare_chromium()
        self._hosts.bring_up("end-to-end")
        self._on_demo("end-to-end", "--timeout", "900", environment=_pictures())

    def _faults(self) -> None:
        self._hosts.bring_up("faults")
        self._on_demo("faults", "--timeout", "900")

    def _sites(self) -> None:
        """Each site takes its hosts away again. What Ansible and the hosts printed stays in the cache."""
        if not (shutil.which("ssh") and shutil.which("ssh-keygen")):
            debian.apt_install("openssh-client")
        debian.prepare_compiler()
        debian.prepare_chromium()
        tests = map(target_of_site, self._request.sites)
        self._pytest("sites", *tests, "--timeout", "14400", "-rP", *self._request.arguments)


def target_of_site(site: str) -> str:
    """What pytest gets to run the tests of a site: a file, or the class of a site with a Slurm of its own."""
    if site.startswith("existing-"):
        return f"tests/sites/test_own_slurm.py::TestExisting{''.join(filter(str.isdigit, site))}"
    return f"tests/sites/test_{re.sub('[-.]', '_', site)}.py"


def use(python: Path) -> None:
    """Find the programs of the tests' environment first, from now on, and compute once what many need.

    Python leaves compiled files, whatever the caller's environment says: tests start thousands of its
    programs, and each of them would compile all that it imports. The tables of characters that Hypothesis
    makes lie in the cache, or each clean checkout would need seconds for its own.

    Args:
        python: Its interpreter.
    """
    os.environ["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(debian.CACHE / "hypothesis"))
    sys.stdout.flush()
