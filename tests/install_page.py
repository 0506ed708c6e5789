"""Text that readers copy from docs/admins: the worked examples of install.md, and lines of other pages."""

import re
from pathlib import Path

_ADMINS = Path(__file__).resolve().parent.parent / "docs/admins"
PAGE = (_ADMINS / "install.md").read_text()
#: What of the line below goes with Carme.
EXPORTERS_GROUP = ",gid=carme-exporter"
_BLOCK = re.compile(r"`inventories/([\w-]+)/([\w./]+)`[^\n]*\n\n```yaml\n(.*?)```", re.DOTALL)
#: An example's inventory, by its name: file to text.
FILES: dict[str, dict[str, str]] = {}
for _name, _file, _text in _BLOCK.findall(PAGE):
    FILES.setdefault(_name, {})[_file] = _text
#: What is typed, in the page's order; each begins with ansible-playbook -i inventories/NAME.
COMMANDS: list[str] = re.findall(r"^ansible-playbook .*", PAGE, re.MULTILINE)


def commands(name: str) -> list[str]:
    """The commands of one example."""
    return [command for command in COMMANDS if f" inventories/{name} " in command]


def hook_line(hook: str) -> str:
    """The line that calls Carme's prolog or epilog from the site's own."""
    start = f"[ ! -x /usr/libexec/carme/{hook} ]"
    (line,) = (line for line in PAGE.splitlines() if line.startswith(start))
    return line


def processes_line() -> str:
    """The line of security.md for /etc/fstab, by which /proc hides the processes of others."""
    (line,) = re.findall(r"^proc /proc .*", (_ADMINS / "security.md").read_text(), re.MULTILINE)
    assert EXPORTERS_GROUP in line
    return line


def processes_command() -> str:
    """The command of security.md that does the same at once."""
    (command,) = re.findall(r"`(mount -o remount,[^`]*)`", (_ADMINS / "security.md").read_text())
    return command
