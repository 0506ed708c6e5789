"""What the documentation promises exists: settings, commands with their options, variables and suites."""

import argparse
import ast
import contextlib
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, get_args

import django.core.management.base
import pytest
from pydantic import BaseModel

from carme.backup.main import command_parser as backup_parser
from carme.cli.parsing import parser as carme_parser
from carme.config import Settings
from carme.heads.main import command_parser as head_parser
from carme.sandbox.supervisor import command_parser as dev_parser
from carme_runtime.launcher.arguments import parser as run_parser
from carme_spawner.hub import command_parser as hub_parser
from suites import arguments

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("*/*/*/README.md"),
    )
    # Earlier names stand in the first one, and pytest's in its folder.
    if page.name != "CHANGELOG.md" and page.parent.name != ".pytest_cache"
)
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
#: Names in code, and options of other programs, that programs of Carme never mention.
OF_OTHERS = {
    *("--failed", "--no-package-lock", "--no-verify", "--parallel", "--pty"),
    *("ACCELERATE_MIXED_PRECISION", "BASE_URL", "CAP_LINUX_IMMUTABLE", "DS_BUILD_SHM_COMM"),
    *("HOROVOD_CYCLE_TIME", "MPI_COLLECTIVE_BEGIN", "MPI_RECV", "PYTORCH_CUDA_ALLOC_CONF", "RMA_ATOMIC"),
    *("RMA_GET", "RMA_SYNC", "SITE_URL", "SLURM_INCLUDE_DIR", "SLURM_LIB_DIR", "expandable_segments"),
    *("full_name_format", "jwt_key", "num_replicas", "oob_tcp_if_include", "parse_range_header", "rest_auth"),
    *("to_yaml",),
}
#: Its letters in capitals stand for something.
PLACEHOLDERS = {"carme_UID_KEY"}
#: Words of Carme's own variables for Ansible that are packages of Python.
PACKAGES = {"carme_runtime", "carme_webui", "carme_spawner", "carme_monitoring", "carme_demo"}


def test_settings_of_blocks_are_accepted() -> None:
    blocks = [(page, block) for page in PAGES for kind, block in fences(page) if kind == "toml"]
    assert len(blocks) >= 6
    for page, block in blocks:
        values = tomllib.loads(block)
        values.setdefault("site", {}).setdefault("url", "https://carme.example.org")
        values.setdefault("slurm", {}).setdefault("cluster", "c")
        try:
            Settings.model_validate(values)
        except ValueError as error:
            pytest.fail(f"{page}: {error}")


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = [
        *re.findall(r"`\[([a-z_.]+)\] ?([a-z_]*)", text),
        *(
            found[::-1]
            for found in re.findall(r"`([a-z_]+)(?: = [^`]*)?` (?:in|of|under) `\[([a-z_.]+)\]`", text)
        ),
        *re.findall(
            r"`((?:slurm|portal|monitoring|sessions|bookings|staging|hub|broker)(?:\.[a-z]+)*)\.([a-z_]+) =",
            text,
        ),
    ]
    missing = [
        f"[{section}] {key}"
        for section, key in named
        if not is_setting(Settings, [*section.split("."), *filter(None, [key])])
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_a_page_names_exist(page: str) -> None:
    missing = [" ".join(words) for words in commands(page) if not is_command(words)]
    assert not missing


def test_the_pages_name_each_program_that_is_checked() -> None:
    named = {words[0] for page in PAGES for words in commands(page)}
    assert named == {*PARSERS, "carme-run", "carme-portal", "./test"}


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/admins")])
def test_variables_of_ansible_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    code = "\n".join([*(block for _, block in fences(page)), *SPAN.findall(FENCE.sub("", text))])
    named = set(re.findall(r"(?<![\w/.$-])carme_[a-z0-9_]+\b(?![/(])", code)) - PACKAGES
    assert not {name for name in named if name not in variables() and not name.endswith("_")}


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/benchmarks")])
def test_names_and_options_that_a_page_has_in_code_spans_exist(page: str) -> None:
    spans = SPAN.findall(FENCE.sub("", (ROOT / page).read_text()))
    assert not {name for span in spans for name in names_of(span)} - words() - OF_OTHERS - PLACEHOLDERS


def test_what_does_not_exist_is_found() -> None:
    assert is_setting(Settings, ["partitions", "gpu", "bookings", "gpu_hours"])
    assert not is_setting(Settings, ["slurm", "nothing"]) and not is_setting(Settings, ["nothing"])
    carme, run = known_parser("carme"), known_parser("carme-run")
    assert understands(carme, ["session", "open", "NAME", "--app", "APP"])
    assert not understands(carme, ["nothing"]) and not understands(carme, ["session", "nothing"])
    assert not understands(carme, ["submit", "--nothing"])
    assert not understands(carme, ["submit", "--template", "nothing"])
    assert understands(carme, ["submit", "--template", "NAME"])
    assert not has_options(run, ["--backend", "nothing", "x.py"]) and has_options(run, ["--backend=mpi"])
    assert {"poll_seconds", "CARME_DATA", "--max-restarts"} <= words()
    assert not {"poll_secs", "CARME_DATUM", "--most-restarts"} & words()
    assert names_of("[slurm] poll_seconds = 2, --no-gpu") == {"poll_seconds", "--no-gpu"}
    assert has_options(run, ["-n", "2", "train.py", "--theirs"]) and not has_options(run, ["--nothing"])
    assert is_command(["carme-portal", "add-user", "NAME", "--admin"])
    assert not is_command(["carme-portal", "nothing"])
    assert not is_command(["carme-portal", "add-user", "--nothing"])
    assert is_command(["./demo", "--name", "second", "up", "--port", "9443"])
    assert not is_command(["./demo", "--name", "second", "nothing"])
    assert not is_command(["./demo", "up", "--nothing"]) and not is_command(["carme-head", "nothing"])
    assert is_command(["carme-head", "status"]) and not is_command(["carme-backup", "create", "--nothing"])
    assert is_command(["carme-hub", "--certificates"]) and not is_command(["carme-hub", "--nothing"])
    assert not is_command(["./dev", "--nothing"]) and not is_command(["./release", "--nothing"])
    assert is_test(["bench", "petri"]) and not is_test(["bench", "nothing"]) and not is_test(["nothing"])


def fences(page: str) -> list[tuple[str, str]]:
    """The blocks of code of a page: language and text."""
    return FENCE.findall((ROOT / page).read_text())


def commands(page: str) -> Iterator[list[str]]:
    """The commands in blocks and spans of a page, as words, without what they start or pipe into."""
    text = (ROOT / page).read_text()
    lines = [
        line
        for kind, block in FENCE.findall(text)
        if kind in ("", "sh", "bash")
        for line in block.splitlines()
    ]
    for line in [*lines, *SPAN.findall(FENCE.sub("", text))]:
        try:
            line = re.sub(r"^(?:\$ )?(?:sudo (?:-u [\w-]+ (?:-- )?)?)?(?:/opt/carme/venv/bin/)?", "", line)
            words = [
                word if word == "[]" else word.strip("[]")  # what may be left out counts, too
                for word in shlex.split(line.replace("; ", " ; "), comments=True)
            ]
        except ValueError:
            continue
        end = [place for place, word in enumerate(words) if word in ("--", "|", "||", "&&", ";", ">", "...")]
        words = words[: end[0]] if end else words
        if len(words) > 1 and words[0] in (*PARSERS, "carme-run", "carme-portal", "./test"):
            yield words


def demo_parser() -> argparse.ArgumentParser:
    """The command line of `./demo`, whose package is not part of the product."""
    sys.path.insert(0, str(ROOT / "ansible/demo"))
    try:
        from carme_demo.command_line import parser
    finally:
        sys.path.pop(0)
    return parser()


def release_parser() -> argparse.ArgumentParser:
    """The command line of `./release`, a script without an extension."""
    loader = SourceFileLoader("release_script", str(ROOT / "release"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module.command_parser()


#: The programs that argparse reads for, with their command lines.
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "carme": carme_parser,
    "carme-backup": backup_parser,
    "carme-head": head_parser,
    "carme-hub": hub_parser,
    "./demo": demo_parser,
    "./dev": dev_parser,
    "./release": release_parser,
}


@cache
def known_parser(program: str) -> argparse.ArgumentParser:
    return run_parser() if program == "carme-run" else PARSERS[program]()


def is_command(words: list[str]) -> bool:
    """Whether a program has these commands and options."""
    program, *arguments = words
    if program == "./test":
        return is_test(arguments)
    if program == "carme-run":
        return has_options(known_parser(program), arguments)
    if program == "carme-portal":
        return is_portal_command(arguments)
    return understands(known_parser(program), arguments)


def is_portal_command(words: list[str]) -> bool:
    """Whether this is a command of the portal's or of Django's, with its options."""
    name = words[0].replace("-", "_")
    files = [
        file
        for folder in (ROOT / "webui/src/carme_webui", Path(django.__file__).parent)
        for file in folder.rglob(f"management/commands/{name}.py")
    ]
    if not files:
        return name == "help"  # which Django answers without a module
    given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    shared = [*files[0].parent.parent.glob("*.py"), ROOT / "carme/src/carme/command_line.py"]
    return given <= declared_options(files[0], shared)


def declared_options(file: Path, shared: list[Path]) -> set[str]:
    """The options of a command of Django's, read from its source: importing it takes a site.

    Args:
        file: The command's module.
        shared: Modules whose functions declare options for several commands.
    """
    command = ast.parse(file.read_text())
    called = {node.id for node in ast.walk(command) if isinstance(node, ast.Name)}
    functions = [
        node
        for module in shared
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in called
    ]
    base = ast.parse(Path(django.core.management.base.__file__).read_text())
    return {
        argument.value
        for tree in (command, base, *functions)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") in ("add_argument", "add_base_argument")
        for argument in node.args
        if isinstance(argument, ast.Constant)
        and isinstance(argument.value, str)
        and argument.value.startswith("--")
    }


def understands(parser: argparse.ArgumentParser, words: list[str]) -> bool:
    """Whether these are commands and options of a program; names of things may follow."""
    below = any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
    if below and words and words[0].startswith("--") and has_options(parser, words[:2]):
        action = parser._option_string_actions[words[0].partition("=")[0]]
        return understands(parser, words[1 if action.nargs == 0 or "=" in words[0] else 2 :])
    for action in parser._actions:
        if (
            isinstance(action, argparse._SubParsersAction)
            and words
            and re.fullmatch(r"[a-z][a-z-]+", words[0])
        ):
            below = action.choices.get(words[0])
            return below is not None and understands(below, words[1:])
    # What takes all words hands them on to another program.
    passes_on = any(action.nargs == argparse.REMAINDER for action in parser._actions)
    return (
        passes_on
        or getattr(parser, "passes_on", False)
        or all(
            has_options(parser, words[place : place + 2])
            for place, word in enumerate(words)
            if word[:1] == "-"
        )
    )


def has_options(parser: argparse.ArgumentParser, words: list[str]) -> bool:
    """Whether the options in front are a program's; what follows them belongs to another one."""
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            action = parser._option_string_actions.get(name)
            following = value or next(iter(words[place + 1 :]), "")
            if action is None or not is_choice(action, following):
                return False
        elif not word.startswith("-"):
            break
    return True


def is_choice(action: argparse.Action, word: str) -> bool:
    """Whether an option may have this value: any where it has no choices; capitals stand for one."""
    return not action.choices or word.isupper() or not word or word in map(str, action.choices)


def names_of(span: str) -> set[str]:
    """The names with an underscore, and the long options, in a span of code."""
    found = re.findall(r"(?<![\w./@-])(?:[A-Za-z]\w*_\w+|--[a-z][a-z-]*[a-z])", span)
    return {name for name in found if not name.endswith("_")}


@cache
def words() -> frozenset[str]:
    """All names and long options of our code, tests included, and of the files that it installs."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    found: set[str] = set()
    for name in listed.stdout.split("\0"):
        file = ROOT / name
        of_pages = file.suffix in (".md", ".po", ".json", ".html") and not name.startswith("webui/src")
        if of_pages or "/vendor/" in name or file == Path(__file__) or not file.is_file():
            continue
        with contextlib.suppress(UnicodeDecodeError):  # a picture or a compiled catalogue
            found.update(re.findall(r"[A-Za-z_]\w*|--[a-z][a-z-]*[a-z]", file.read_text()))
    return frozenset(found)


def is_test(words: list[str]) -> bool:
    """Whether these are suites, sites or a benchmark of `./test`."""
    names = [word for word in words if re.fullmatch(r"[a-z][\w.-]*", word)]
    if names[:1] == ["bench"]:
        return not names[1:] or names[1] in arguments.BENCHMARKS
    return "--quick" in words or all(name in (*arguments.SUITES, *arguments.SITES) for name in names)


def is_setting(model: Any, path: list[str]) -> bool:
    """Whether a model of settings has this key, or a model below it."""
    if not path:
        return True
    if not (isinstance(model, type) and issubclass(model, BaseModel)) or path[0] not in model.model_fields:
        return False
    annotation = model.model_fields[path[0]].annotation
    parts = get_args(annotation)
    if len(parts) == 2 and annotation is not None and getattr(annotation, "__origin__", None) is dict:
        return is_setting(parts[1], path[2:])  # the name of a partition, a project or a folder between
    return is_setting(annotation, path[1:])


@cache
def variables() -> set[str]:
    """Every variable that a role, an inventory or a playbook has."""
    files = [file for file in (ROOT / "ansible").rglob("*") if file.suffix in (".yml", ".j2", ".yaml", ".md")]
    return {name for file in files for name in re.findall(r"\bcarme_[a-z0-9_]+", file.read_text())}


#: Bold words of the guides: a label of a page, unless they begin an item or are a sentence.
LABEL = re.compile(r"(?P<item>- )?\*\*(?P<words>[^*]+)\*\*")
#: Guides about the portal's pages and JupyterLab.
GUIDES = ("account", "bookings", "files", "images", "projects", "sessions", "usage")


@pytest.mark.parametrize("name", GUIDES)
def test_labels_that_a_guide_names_are_on_the_pages(name: str) -> None:
    guide = FENCE.sub("", (ROOT / f"docs/users/{name}.md").read_text())
    labels = {
        " ".join(label.split()).rstrip(".:…")
        for found in LABEL.finditer(guide)
        if not found["item"]
        for label in found["words"].split(" → ")
    }
    named = {label for label in labels if len(label.split()) <= 6}
    assert not {label for label in named if label not in texts_of_pages()}


@cache
def texts_of_pages() -> str:
    """The portal's templates, forms and scripts, and JupyterLab's extensions, with single spaces."""
    files = (
        file
        for part in ("webui/src", "spawner/src")
        for file in (ROOT / part).rglob("*")
        if file.suffix in (".html", ".py", ".js") and "vendor" not in file.parts
    )
    return " ".join(" ".join(file.read_text().split()) for file in files)
