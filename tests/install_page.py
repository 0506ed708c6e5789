"""The worked examples of docs/admins/install.md, as their readers copy them."""

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parent.parent / "docs/admins/install.md").read_text()
_BLOCK = re.compile(r"`inventories/([\w-]+)/([\w./]+)`[^\n]*\n\n```yaml\n(.*?)```", re.DOTALL)
#: An example's inventory, by its name: file to text.
FILES: dict[str, dict[str, str]] = {}
for _name, _file, _text in _BLOCK.findall(PAGE):
    FILES.setdefault(_name, {})[_file] = _text
#: What is typed, in the page's order; each begins with ansible-playbook -i inventories/NAME.
COMMANDS: list[str] = re.findall(r"^ansible-playbook .*", PAGE, re.MULTILINE)


def commands(name: str) -> list[str]:
    """What is typed for one example."""
    return [command for command in COMMANDS if f" inventories/{name} " in command]


def hook_line(hook: str) -> str:
    """The line that calls Carme's prolog or epilog from the site's own."""
    start = f"[ ! -x /usr/libexec/carme/{hook} ]"
    (line,) = (line for line in PAGE.splitlines() if line.startswith(start))
    return line
