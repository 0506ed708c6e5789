"""The commands of ./demo."""

import argparse
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import cleanup, host, image, registries, settings, status
from .deployment import Deployment
from .errors import DemoError
from .nodes import Nodes
from .podman import Podman, host_runtime
from .settings import Places, Settings
from .stages import Stages

ROOT = Path(__file__).resolve().parents[3]
READY_SECONDS = 90
CARME = "/opt/carme/venv/bin/carme"
CERTIFICATE = "/etc/carme/tls/site.pem"
#: For documentation alone (RFC 5737). Where a demo's own network is not known, what belongs to it is found by
#: its name, and another demo's rules of the firewall stay.
NOBODYS_SUBNET = "192.0.2.0/24"
SLURM_UNITS = ("slurmctld", "slurmdbd", "slurmd", "slurmrestd")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="./demo",
        description="A Carme site of three real hosts on this machine. Without a command: up.",
        epilog="For the options of a command: ./demo COMMAND --help. All commands but --help need root.",
    )
    top.add_argument(
        "--name", default=argparse.SUPPRESS, help="which demo, where several exist (default: carme)"
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        each = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        each.add_argument(
            "--name", default=argparse.SUPPRESS, help="which demo, where several exist (default: carme)"
        )
        return each

    _add_up(command)
    _add_hosts(command)
    show = command(
        "status", "show nodes, services and address; the exit status is 0 only when the demo is ready"
    )
    show.add_argument("--json", action="store_true", help="print for programs")
    command("run", "run the main job as an ordinary user: start a notebook and train over the nodes")
    _add_inspection(command)
    command("down", "stop everything, keep the nodes' disks: the next up takes seconds")
    reset = command("reset", "remove the nodes and all data; downloaded packages and images stay")
    reset.add_argument(
        "--all", action="store_true", help="remove these too, and the settings: no trace stays"
    )
    return top


#: Makes a command of its name and its help.
Command = Callable[[str, str], argparse.ArgumentParser]


def _add_up(command: Command) -> None:
    up = command("up", "set the demo up, repair it or bring it up to date, then run the main job")
    up.add_argument("--no-run", action="store_true", help="leave the main job out")
    up.add_argument("--nodes", type=int, metavar="N", help="compute nodes (default: 2, or as before)")
    up.add_argument(
        "--gpus", type=int, metavar="N", help="pretended GPUs per node (default: 4, or as before)"
    )
    up.add_argument("--port", type=int, help="port of the portal on 127.0.0.1 (default: 8443, or as before)")
    up.add_argument("--subnet", help="network of the nodes (default: 10.77.0.0/24, or as before)")
    up.add_argument(
        "--images",
        metavar="NAMES",
        type=lambda names: names.split(","),
        help="job images separated by commas, besides base and torch: vscode (VS Code's tile, 120 MB "
        "and some minutes more), tensorflow, mxnet, dask, ray (default: base,torch, or as before)",
    )
    up.add_argument(
        "--monitoring", action="store_const", const=True, help="also Prometheus and its alerts, from now on"
    )

    up.add_argument(
        "--horovod",
        action="store_const",
        const=True,
        help="also Horovod in the images of PyTorch and TensorFlow, from now on; compiled once, for some "
        "minutes",
    )


def _add_hosts(command: Command) -> None:
    hosts = command("hosts", "set up the bare hosts only: nothing of Carme is installed")
    for option in ("--nodes", "--gpus", "--port"):
        hosts.add_argument(option, type=int, metavar="N", help="as for up")
    hosts.add_argument("--subnet", help="as for up")
    hosts.set_defaults(images=None, monitoring=None, horovod=None)


def _add_inspection(command: Command) -> None:
    """Commands that inspect the nodes."""
    shell = command("shell", "open a shell as root on a node, or run a command there")
    shell.add_argument("node", help="head, n1, n2 ...")
    shell.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="COMMAND", help="a command instead of a shell"
    )

    logs = command("logs", "show logs of all nodes")
    logs.add_argument(
        "what",
        nargs="?",
        default="ansible",
        metavar="WHAT",
        help="ansible (default), image, packages, boot, slurm, or a systemd unit such as carme-hub",
    )
    logs.add_argument("-n", "--lines", type=int, default=60, metavar="N", help="lines per log (default: 60)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted.
    """
    options = parser().parse_args(arguments)
    if options.command is None:
        chosen = [] if not hasattr(options, "name") else ["--name", options.name]
        options = parser().parse_args([*chosen, "up"])
    stages = Stages()
    try:
        if os.geteuid() != 0:
            raise DemoError("The demo starts real hosts and needs root.", "Use: sudo ./demo")
        return Demo(Places(getattr(options, "name", settings.DEFAULT_NAME)), stages).command(options)
    except DemoError as error:
        _report(stages, error)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted. The same command goes on from here.", file=sys.stderr)
        return 130


def _report(stages: Stages, error: DemoError) -> None:
    for line in host.last_lines(error.log):
        print(f"    {line}", file=sys.stderr)
    print(f"demo: {error}", file=sys.stderr)
    if error.log is not None:
        print(f"demo: the whole log is {error.log}", file=sys.stderr)


class Demo:
    """One demo and what can be done with it."""

    def __init__(self, places: Places, stages: Stages) -> None:
        self.places = places
        self.stages = stages
        self.podman = Podman(places, host_runtime())

    def command(self, options: argparse.Namespace) -> int:
        """Run the command that was typed."""
        match options.command:
            case "up":
                return self.up(options, run=not options.no_run)
            case "hosts":
                return self.hosts(options)
            case "status":
                return self.status(options.json)
            case "run":
                return self.run_main_job(self._existing())
            case "shell":
                return self.shell(options.node, options.arguments)
            case "logs":
                return self.logs(options.what, options.lines)
            case "down":
                return self.down()
            case _:
                return self.reset(everything=options.all)

    # -- commands ------------------------------------------------------------------------------------------

    def up(self, options: argparse.Namespace, *, run: bool) -> int:
        """Everything: hosts, product, main job."""
        with host.exclusive_lock(self.places):
            chosen, nodes = self._hosts(options)
            deployment = Deployment(ROOT, self.podman, self.places, chosen, nodes)
            if deployment.is_current():
                self.stages.line("Carme is installed and up to date")
            else:
                with self.stages.stage("Copy the source tree to the head"):
                    deployment.copy()
                self.stages.line("Install Carme with its own playbook")
                deployment.play(self.stages)
            with self.stages.stage("Wait until all services answer"):
                seen = status.wait(self.podman, self.places, chosen, set(self._alive()), READY_SECONDS)
            if not seen.ready:
                raise DemoError(
                    f"The demo is installed but not ready: {' '.join(seen.problems)}",
                    "See ./demo status and ./demo logs WHAT; ./demo reset starts from a clean slate.",
                )
        if run:
            failed = self.run_main_job(chosen)
            if failed:
                return failed
        self._print_welcome(chosen)
        return 0

    def hosts(self, options: argparse.Namespace) -> int:
        """The bare hosts."""
        with host.exclusive_lock(self.places):
            chosen, _ = self._hosts(options)
        for node in chosen.machines():
            print(f"  {node.name:<6} {node.address}")
        return 0

    def status(self, as_json: bool) -> int:
        """Show what runs."""
        chosen = settings.load(self.places)
        if chosen is None:
            seen = status.Status(
                self.places.name, "", problems=["There is no demo. Set it up with: sudo ./demo"]
            )
        else:
            seen = status.of_demo(self.podman, self.places, chosen, set(self._alive()))
        print(seen.as_json() if as_json else seen.as_text())
        return 0 if seen.ready else 1

    def run_main_job(self, chosen: Settings) -> int:
        """What a user of the site does, from the login to a training over two nodes; output as it comes."""
        if "head" not in self._alive():
            raise DemoError("The demo does not run.", "Start it with: sudo ./demo up --no-run")
        print("\nMain job, as user1", flush=True)
        size = ["--nodes", str(min(2, chosen.nodes)), "--gpus", str(min(2, chosen.gpus))]
        site = ["--url", chosen.url, "--certificate", CERTIFICATE]
        command = [CARME, "validate", "--training", *site, "--user", "user1", "--password-file", "-", *size]
        home = ["-C", "/home/user1", "HOME=/home/user1", "USER=user1"]
        as_user = ["runuser", "-u", "user1", "--", "env", *home]
        done = subprocess.run(
            self.podman.inside("head", [*as_user, *command], terminal=False),
            env={**os.environ, **self.podman.environment},
            input=(settings.passwords(self.places)["user1"] + "\n").encode(),
            check=False,
        )
        if done.returncode:
            print("demo: the main job failed. See above, and ./demo logs carme-broker.", file=sys.stderr)
        return 1 if done.returncode else 0

    def shell(self, node: str, arguments: list[str]) -> int:
        """A root shell on a node."""
        self._check_node(node)
        words = arguments[1:] if arguments[:1] == ["--"] else arguments
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self.podman.replace_process(self.podman.inside(node, words or ["/bin/bash", "-l"], terminal=terminal))
        return 1  # not reached: the process has become the shell

    def logs(self, what: str, lines: int) -> int:
        """Show logs."""
        own = {"ansible": "ansible.log", "image": "image.log", "packages": "packages.log"}
        if what in own:
            file = self.places.log / own[what]
            if not file.is_file():
                raise DemoError(
                    f"There is no {what} log yet.", "It is written when ./demo up does that stage."
                )
            print("\n".join(host.last_lines(file, lines)))
            return 0
        if not re.fullmatch(r"[A-Za-z0-9@._:-]+", what) or what.startswith("-"):
            raise DemoError(
                f"There is no log called {what!r}.",
                "Choose ansible, image, packages, boot, slurm, or a systemd unit such as carme-hub.",
            )
        units = (
            []
            if what == "boot"
            else [f"--unit={unit}" for unit in (SLURM_UNITS if what == "slurm" else (what,))]
        )
        alive = self._alive()
        if not alive:
            raise DemoError("The demo does not run.", "Start it with: sudo ./demo up --no-run")
        for node in alive:
            command = ("journalctl", "--no-pager", "--boot", f"--lines={lines}", *units)
            message = (
                self.podman.execute(node, *command, check=False, timeout=60)
                .stdout.decode(errors="replace")
                .strip()
            )
            if message and "-- No entries --" not in message:
                print(f"== {node}\n{message}\n")
        return 0

    def down(self) -> int:
        """Stop."""
        chosen = settings.load(self.places)
        if chosen is None:
            print("There is no demo.")
            return 0
        with host.exclusive_lock(self.places), self.stages.stage("Stop services and nodes"):
            self._nodes(chosen).halt()
            cleanup.sweep(self.podman, [], chosen.subnet)
            cleanup.remove_tree(self.places.run)
        return 0

    def reset(self, *, everything: bool) -> int:
        """Remove."""
        chosen = settings.load(self.places) if not everything or self.places.settings.exists() else None
        if chosen is None and not self.places.state.exists():
            print("There is no demo.")
            return 0
        chosen = chosen or self._settings_when_lost()
        with host.exclusive_lock(self.places), self.stages.stage("Remove the nodes and their data"):
            cleanup.end_processes_in(self.places.state / "tmp")
            if self.places.storage.exists():
                self.podman.configure()
                self._nodes(chosen).destroy()
            cleanup.sweep(self.podman, [], chosen.subnet)
            cleanup.remove_tree(self.places.run)
            if everything:
                host.remove_state(self.places)
        return 0

    # -- steps ---------------------------------------------------------------------------------------------

    def _hosts(self, options: argparse.Namespace) -> tuple[Settings, Nodes]:
        known = settings.load(self.places) or Settings()
        given = {
            name: getattr(options, name)
            for name in ("nodes", "gpus", "port", "subnet", "images", "monitoring", "horovod")
        }
        chosen = dataclasses.replace(
            known, **{name: value for name, value in given.items() if value is not None}
        )
        taken = chosen if (chosen.port, chosen.subnet) == (known.port, known.subnet) else None
        bridge = Path("/sys/class/net", self.places.bridge).exists()
        host.check_host(self.places, chosen, running=bridge and taken is not None)
        with self.stages.stage("Look for what this host lacks"):
            added = host.install_packages(self.podman.runtime, self.places)
        if added:
            self.stages.line(f"  installed: {' '.join(added)}")
        cleanup.end_processes_in(self.places.state / "tmp")
        cleanup.remove_tree(self.places.state / "tmp")
        self.podman.configure()
        settings.save(self.places, chosen)
        found = registries.of_host()
        nodes = Nodes(self.podman, self.places, chosen, found)
        with self.stages.stage("Look for remains of a sudden end"):
            repaired = nodes.repair()
        if repaired:
            self.stages.line("  cleared them away; the nodes' disks are kept")
        with self.stages.stage("Make the nodes' file system, or take the one kept"):
            name = image.prepare(self.podman, self.places, found)
        with self.stages.stage(f"Start the head and {chosen.nodes} compute nodes"):
            changed = nodes.bring_up(name)
        if changed:
            self.stages.line(f"  made anew: {' '.join(changed)}")
        return chosen, nodes

    def _nodes(self, chosen: Settings) -> Nodes:
        self.podman.configure()
        return Nodes(self.podman, self.places, chosen, registries.Registries())

    def _settings_when_lost(self) -> Settings:
        """Of a demo that has files but no settings: only the first one has the network of every default."""
        is_first = self.places.name == settings.DEFAULT_NAME
        return Settings() if is_first else Settings(subnet=NOBODYS_SUBNET)

    def _existing(self) -> Settings:
        chosen = settings.load(self.places)
        if chosen is None:
            raise DemoError("There is no demo.", "Set it up with: sudo ./demo")
        return chosen

    def _alive(self) -> list[str]:
        prefix = f"{self.places.name}-"
        if not self.places.run.exists():
            return []  # asking podman would make its run folder
        return sorted(
            (each.name.removeprefix(prefix) for each in self.podman.containers() if each.is_alive),
            key=lambda name: (name != "head", name),
        )

    def _check_node(self, node: str) -> None:
        alive = self._alive()
        if node not in alive:
            names = ", ".join(each.name for each in self._existing().machines())
            raise DemoError(
                f"There is no running node called {node!r}.",
                f"The nodes are {names}; start them with: sudo ./demo up --no-run",
            )

    def _print_welcome(self, chosen: Settings) -> None:
        words = settings.passwords(self.places)
        print(f"\nReady after {self.stages.total():.0f} s: {chosen.url}\n")
        for user in settings.USERS:
            role = "administrator" if user["admin"] else "user"
            print(f"  {user['name']:<6} {words[user['name']]:<18} {role}")
        print(
            "\nThe browser will ask about the certificate: it is the demo's own.\n"
            "Try next: log in as user1 and press Start; ./demo shell head carme status; ./demo status; "
            "./demo down"
        )
