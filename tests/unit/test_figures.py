"""No new circles of imports, no new long functions and no new long files."""

import ast
import re
from pathlib import Path

import pytest

import c_functions
import figures
import js_functions
from carme.broker.protocol import OPERATIONS

#: What is left, to be shortened and never to grow: circles by their first module, with the number of modules.
LEFT_CIRCLES: dict[str, int] = {}


#: The same of circles in which some imports are for type checkers alone.
LEFT_TYPE_CIRCLES: dict[str, int] = {}


#: What is left of files over 600 lines, with their lines.
LEFT_FILES: dict[str, int] = {}


@pytest.fixture(scope="module")
def circles() -> list[list[str]]:
    """Of the whole tree, which takes seconds to read."""
    return figures.circles()


@pytest.fixture(scope="module")
def type_circles() -> list[list[str]]:
    """Likewise, where imports for type checkers count."""
    return figures.circles(with_types=True)


@pytest.fixture(scope="module")
def long_functions() -> dict[str, int]:
    """Of the whole tree."""
    return figures.long_functions()


def test_modules_import_each_other_in_no_new_circles(circles: list[list[str]]) -> None:
    judge(circles, LEFT_CIRCLES)


def test_types_make_no_new_circles(type_circles: list[list[str]]) -> None:
    judge(type_circles, LEFT_TYPE_CIRCLES)


def judge(circles: list[list[str]], left: dict[str, int]) -> None:
    found = {circle[0]: circle for circle in circles}
    new = {name: circle for name, circle in found.items() if len(circle) > left.get(name, 0)}
    assert not new, "These modules import each other. Move what both need into a module of its own."
    done = {name: size for name, size in left.items() if len(found.get(name, [])) < size}
    assert not done, "These circles are smaller or gone: change the list of those that are left."


def test_the_api_imports_no_views_and_pages_nothing_of_the_api() -> None:
    portal = figures.ROOT / "webui/src/carme_webui"
    wrong = [
        f"{file.relative_to(portal)}: {module}"
        for file in portal.rglob("*.py")
        for module in imported(file)
        if (file.parent.name == "api" and module.endswith(".views"))
        or (file.parent.name != "api" and file.name == "views.py" and module.startswith("carme_webui.api."))
    ]
    assert not wrong, "Move what both need into a module of services."


def imported(file: Path) -> list[str]:
    """The modules that a file names in its imports, and what it takes from them, as MODULE.NAME."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_functions_stay_short(long_functions: dict[str, int]) -> None:
    assert not long_functions, "These functions are over 60 lines. Split them by what they do."


def test_files_stay_short() -> None:
    found = figures.long_files()
    new = {file: lines for file, lines in found.items() if lines > LEFT_FILES.get(file, 0)}
    assert not new, "These files are over 600 lines, or longer than they were. Split them by concept."
    done = {file for file, lines in LEFT_FILES.items() if found.get(file, 0) < lines}
    assert not done, "These files are shorter now: lower their numbers in LEFT_FILES."


@pytest.mark.parametrize(("lines", "is_long"), [(60, False), (61, True)])
def test_long_functions_are_found(tree: Path, lines: int, is_long: bool) -> None:
    write(tree, a="def short():\n    pass\n\n\ndef long():\n" + "    pass\n" * (lines - 1))
    found = figures.long_functions()
    assert found == ({"part/src/pack/a.py:long": lines} if is_long else {})


@pytest.mark.parametrize(("lines", "is_long"), [(60, False), (61, True)])
def test_long_functions_of_c_are_found(tree: Path, lines: int, is_long: bool) -> None:
    body = "    work();\n" * (lines - 2)
    (tree / "a.cpp").write_text(f"namespace a {{\n\nint Thing::long_one(int x) {{\n{body}}}\n\n}}\n")
    assert figures.long_functions() == ({"part/src/pack/a.cpp:Thing::long_one": lines} if is_long else {})


def test_functions_of_c_are_found_whatever_is_around_them() -> None:
    source = """\
#define LOOP(x) for (;;) { x; \\
    }
int table[] = {1, 2};
enum class Kind { a, b };
// void in_comment() {
struct Thing : Other {
    Thing(int x) : x_(x) {
        const char* text = "}";
    }
    bool is_there() const { return '}' == x_; }
    int x_{3};
};
static void
two_lines(void)
{
}
bool tries(int x) try {
    return true;
} catch (const std::exception& error) {
    return false;
}
extern "C" {
int inner(void) { return 1'000; }
}
"""
    assert list(c_functions.functions(source)) == [
        ("Thing", 3),
        ("is_there", 1),
        ("two_lines", 4),
        ("tries", 3),
        ("tries", 5),
        ("inner", 1),
    ]


@pytest.mark.parametrize(("lines", "is_long"), [(60, False), (61, True)])
def test_long_functions_of_javascript_are_found(tree: Path, lines: int, is_long: bool) -> None:
    body = "    work();\n" * (lines - 2)
    (tree / "a.js").write_text(f"(() => {{\n  function longOne(x) {{\n{body}  }}\n}})();\n")
    (tree / "vendor").mkdir()
    (tree / "vendor/b.js").write_text(f"function other() {{\n{body}\n\n}}\n")
    assert figures.long_functions() == ({"part/src/pack/a.js:longOne": lines} if is_long else {})


def test_functions_of_javascript_are_found_whatever_is_around_them() -> None:
    source = r"""/* function inComment() { */
'use strict';
(() => {
  const text = "function inText() { it's";
  const brace = /[{/]\/{'/;
  const half = total / 2 / count;
  async function plain(x) {
    if (x) {
      return `a { ${x.map(y => {
        return '}';
      })} {`;
    }
  }
  const arrow = async ({ one, two }) => {
    for (const each of one) {
      two(each);
    }
  };
  const value = x => ({
    x,
  });
  const object = {
    method() {
    },
    execute: async args => {
      await args;
    },
    named: function () {
    }
  };
  class Thing extends Other {
    static get width() {
      return 1;
    }
    async #ask(
      first,
      second,
    ) {
    }
  }
  document.addEventListener('click', () => {
    while (false) {
    }
  });
})();
"""
    nameless = "(function without a name)"
    assert list(js_functions.functions(source)) == [
        ("plain", 7),
        (nameless, 3),
        ("arrow", 5),
        ("value", 3),
        ("method", 2),
        ("execute", 3),
        ("named", 2),
        ("width", 3),
        ("#ask", 5),
        (nameless, 4),
    ]


@pytest.mark.parametrize(("lines", "is_long"), [(600, False), (601, True)])
def test_long_files_are_found(tree: Path, lines: int, is_long: bool) -> None:
    write(tree, a="pass\n" * lines)
    assert figures.long_files() == ({"part/src/pack/a.py": lines} if is_long else {})


def test_the_page_of_the_architecture_has_the_figures_of_today(
    circles: list[list[str]], type_circles: list[list[str]], long_functions: dict[str, int]
) -> None:
    page = (figures.ROOT / "docs/developers/architecture.md").read_text()
    table = page.split("<!-- figures -->")[1].split("<!-- end of figures -->")[0]
    rows = re.findall(r"^\| (.+) \| [\d,]+ \| (?:at most )?([\d,]+) \|$", table, re.MULTILINE)
    now = {name: int(number.replace(",", "")) for name, number in rows}
    parts = {f"lines of `{part}`": count for part, count in figures.lines_of_parts().items()}
    outdated = [name for name, count in parts.items() if abs(now[name] - count) > 300 + count / 10]
    assert not outdated, "These parts have grown or shrunk by a tenth: bring the table up to date."
    sources = [file.read_text() for file in (figures.ROOT / "carme/src").rglob("*.py")]
    declared = sum(len(re.findall(r"^@operation\(", source, re.MULTILINE)) for source in sources)
    assert {name: number for name, number in now.items() if name not in parts} == {
        "functions over 60 lines": len(long_functions),
        "lines of the longest function": figures.LONGEST_FUNCTION,
        "Python files over 600 lines": sum(file.endswith(".py") for file in figures.long_files()),
        "lines of the longest Python file": figures.LONGEST_FILE,
        "groups of modules that import each other": len(circles),
        "such groups with imports for type checkers": len(type_circles),
        "places that declare a broker operation": declared / len(OPERATIONS),
    }


def test_the_page_of_the_architecture_has_the_layers_of_today() -> None:
    page = (figures.ROOT / "docs/developers/architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (`.*`) \|", page, re.MULTILINE)
    shown = {int(number): re.findall(r"`(\w+)`", packages) for number, packages in rows}
    assert shown == dict(enumerate(figures.layers(), 1))


def test_places_that_no_library_takes_have_the_size_that_their_page_says() -> None:
    page = (figures.ROOT / "docs/developers/standard-parts.md").read_text()
    rows = re.findall(r"^\| ([^|]*`[^|]+) \| ([\d,]+(?:, [\d,]+)?) \| \w", page, re.MULTILINE)
    wrong, checked = [], 0
    for place, numbers in rows:
        files = [file for name in re.findall(r"`([^`]+)`", place) for file in files_of(name, place)]
        if "without" in place or not files:
            continue
        total = sum(int(number.replace(",", "")) for number in numbers.split(", "))
        lines = sum(len(file.read_bytes().splitlines()) for file in files)
        checked += 1
        if abs(lines - total) > 50 + total / 5:
            wrong.append(f"{place}: {total}, now {lines}")
    assert checked > 50 and not wrong, "Bring these rows up to date."


def files_of(name: str, place: str) -> list[Path]:
    """The code below a path; one that is not whole begins at a folder above the first path of its row."""
    first = Path(re.findall(r"`([^`]+)`", place)[0])
    found = [figures.ROOT / above / name for above in [Path(), *first.parents]]
    path = next((path for path in found if path.exists()), None)
    if path is None or path.is_file():
        return [path] if path else []
    files = (file for file in path.rglob("*") if file.suffix in figures.SUFFIXES)
    return [file for file in files if not {"__pycache__", "vendor"} & {*file.parts}]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A part of its own; its folder."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "SOURCES", {"part": "part/src"})
    folder = tmp_path / "part/src/pack"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    return folder


def write(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)


def test_packages_are_one_layer_above_the_highest_that_they_import(tree: Path) -> None:
    write(tree, low="", other="import os", middle="from pack import low", high="from pack.middle import x")
    write(tree, side="import pack.other, pack.low")
    assert figures.layers("pack") == [["low", "other"], ["middle", "side"], ["high"]]


@pytest.mark.parametrize(
    "back",
    [
        "import pack.a",
        "from pack import a",
        "from . import a",
        "from .a import name",
        "def later():\n    from pack.a import name",
    ],
)
def test_a_circle_is_found_however_it_is_imported(tree: Path, back: str) -> None:
    write(tree, a="from pack.b import thing", b="import pack.c", c=back)
    assert figures.circles() == [["pack.a", "pack.b", "pack.c"]]


@pytest.mark.parametrize("guard", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_imports_for_type_checkers_make_circles_of_their_own(tree: Path, guard: str) -> None:
    write(tree, a="import pack.b", b=f"if {guard}:\n    import pack.a\nelse:\n    import os")
    assert figures.circles() == []
    assert figures.circles(with_types=True) == [["pack.a", "pack.b"]]


def test_what_runs_where_there_is_no_type_checker_counts(tree: Path) -> None:
    write(tree, a="import pack.b", b="if TYPE_CHECKING:\n    import os\nelse:\n    import pack.a")
    assert figures.circles() == [["pack.a", "pack.b"]]


def test_a_package_is_no_circle_with_modules_that_import_each_other_in_it(tree: Path) -> None:
    write(tree, __init__="from pack import a", a="from pack import b", b="import os")
    assert figures.circles() == []


def test_imports_of_names_and_of_modules_differ() -> None:
    known = {"pack", "pack.a", "pack.b"}
    found = figures.imports("from pack import a, name", "pack.b", False, known)
    assert found == {"pack", "pack.a"}
