"""The code in figures: `python tests/figures.py [--json]`.

Lines of each part, functions over 60 lines (Python, C, C++ and JavaScript), files over 600 lines, and
circles of imports: modules that import each other, directly or by others. Imports in functions count. Circles
that only type checkers see are counted by themselves. `tests/unit/test_figures.py` lets no new ones in.
"""

import argparse
import ast
import functools
import json
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

import c_functions
import js_functions

ROOT = Path(__file__).resolve().parent.parent
#: Each part with the folder that its packages are imported from.
SOURCES = {
    "carme": "carme/src",
    "spawner": "spawner/src",
    "webui": "webui/src",
    "monitoring": "monitoring/src",
    "containers/runtime": "containers/runtime/src",
    "containers/images": "containers/images",
    "ansible/demo": "ansible/demo",
}
LONGEST_FUNCTION = 60
LONGEST_FILE = 600
#: Code of these kinds counts.
C_SUFFIXES = (".cpp", ".hpp", ".h", ".c")
SUFFIXES = (".py", *C_SUFFIXES, ".js", ".css", ".html")
_Import = ast.Import | ast.ImportFrom


def modules() -> dict[str, Path]:
    """Each module of all parts, by the name that it is imported by."""
    found = {}
    for source in SOURCES.values():
        for file in sorted((ROOT / source).rglob("*.py")):
            path = file.relative_to(ROOT / source).with_suffix("")
            parts = path.parts[:-1] if path.name == "__init__" else path.parts
            if parts and "migrations" not in parts and all(part.isidentifier() for part in parts):
                found[".".join(parts)] = file
    return found


class _Facts(NamedTuple):
    """What counts in a module of Python.

    Args:
        functions: Each with its lines.
        imports: The statements that import something when it runs.
        type_imports: The same with those for type checkers.
    """

    functions: list[tuple[str, int]]
    imports: list[_Import]
    type_imports: list[_Import]


@functools.cache
def _facts(source: str) -> _Facts:
    """Those of a module's source: to parse all modules takes most of the time, so it is done once."""
    tree = ast.parse(source)
    functions: list[tuple[str, int]] = []
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        nodes += _statements(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
    needed, for_types = (
        [node for node in _running(tree, with_types) if isinstance(node, _Import)]
        for with_types in (False, True)
    )
    return _Facts(functions, needed, for_types)


def imports(
    source: str, name: str, is_package: bool, known: Set[str], *, with_types: bool = False
) -> set[str]:
    """The modules among `known` that a module imports when it runs; `with_types`: or for type checkers.

    Args:
        source: Of the module.
        name: By which it is imported.
        is_package: Whether it is a package.
        known: Names of modules.
        with_types: See above.
    """
    found = set[str]()
    facts = _facts(source)
    for node in facts.type_imports if with_types else facts.imports:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            above = name.split(".")
            above = above[: len(above) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import module` needs that module; any other name stands in the package itself.
            found |= {full if (full := f"{base}.{alias.name}") in known else base for alias in node.names}
    return (found & known) - {name}


def _running(node: ast.AST, with_types: bool) -> Iterator[ast.AST]:
    """All statements below a node, but what only type checkers see, unless `with_types`."""
    for child in _statements(node):
        if not with_types and isinstance(child, ast.If) and _is_for_checkers(child.test):
            yield from (found for each in child.orelse for found in _running(ast.Module([each], []), False))
        else:
            yield child
            yield from _running(child, with_types)


def _is_for_checkers(test: ast.expr) -> bool:
    """Whether a condition names TYPE_CHECKING, in a module or by itself."""
    return any(
        "TYPE_CHECKING" in (getattr(part, "id", ""), getattr(part, "attr", "")) for part in ast.walk(test)
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements right below a node. Imports and functions are in no expression, and most nodes are."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, name, ())


def circles(*, with_types: bool = False) -> list[list[str]]:
    """Groups of modules in which each imports each other, directly or by others; sorted.

    Args:
        with_types: Imports for type checkers alone count as well.
    """
    graph = _graph(modules(), with_types=with_types)
    return sorted(sorted(group) for group in _components(graph) if len(group) > 1)


def layers(package: str = "carme") -> list[list[str]]:
    """The packages and modules right in a package, in layers: the lowest one imports none of the others.

    Each is one layer above the highest that it imports; those that import each other share one.
    """
    files = {name: file for name, file in modules().items() if name.startswith(f"{package}.")}
    graph: dict[str, set[str]] = {}
    for name, needed in _graph(files).items():
        own = name.split(".")[1]
        graph.setdefault(own, set()).update({module.split(".")[1] for module in needed} - {own})
    found: list[list[str]] = []
    for group in _components(graph):  # those come first that others import
        needed = set[str]().union(*(graph[name] for name in group)) - set(group)
        number = max((above for above, layer in enumerate(found, 1) if needed & set(layer)), default=0)
        found += [[] for _ in range(number + 1 - len(found))]
        found[number] = sorted([*found[number], *group])
    return found


def _graph(files: dict[str, Path], *, with_types: bool = False) -> dict[str, set[str]]:
    """The modules among these that each of them imports."""
    return {
        name: imports(
            file.read_text("utf-8"), name, file.name == "__init__.py", files.keys(), with_types=with_types
        )
        for name, file in files.items()
    }


def _components(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components (Tarjan 1972), without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack = set[str]()
    found: list[list[str]] = []
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for successor in rest:
                if successor not in index:
                    index[successor] = low[successor] = len(index)
                    stack.append(successor)
                    on_stack.add(successor)
                    work.append((successor, iter(sorted(graph[successor]))))
                    break
                if successor in on_stack:
                    low[node] = min(low[node], index[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    place = stack.index(node)
                    found.append(stack[place:])
                    on_stack -= set(stack[place:])
                    del stack[place:]
    return found


def long_functions() -> dict[str, int]:
    """`FILE:NAME` to lines, of functions over LONGEST_FUNCTION: of any language, in all parts and tests."""
    return {
        f"{file.relative_to(ROOT)}:{name}": lines
        for file in _files(".py", ".js", *C_SUFFIXES)
        for name, lines in _functions(file)
        if lines > LONGEST_FUNCTION
    }


def _functions(file: Path) -> Iterator[tuple[str, int]]:
    """The functions of a file, each with its lines."""
    source = file.read_text(encoding="utf-8")
    if file.suffix in C_SUFFIXES:
        yield from c_functions.functions(source)
        return
    if file.suffix == ".js":
        yield from js_functions.functions(source)
        return
    yield from _facts(source).functions


def long_files() -> dict[str, int]:
    """Files of code with more lines than LONGEST_FILE."""
    return {
        str(file.relative_to(ROOT)): lines
        for file in _files(*SUFFIXES)
        if (lines := _lines(file)) > LONGEST_FILE
    }


def lines_of_parts() -> dict[str, int]:
    """Lines of code of each part, and of the tests."""
    found = dict.fromkeys([*SOURCES, "tests"], 0)
    for file in _files(*SUFFIXES):
        path = file.relative_to(ROOT).as_posix()
        part = next((part for part in found if path.startswith(f"{part}/")), None)
        if part:
            found[part] += _lines(file)
    return found


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def _files(*suffixes: str) -> list[Path]:
    """The files of code, without what tools have made."""
    left_out = {"migrations", "__pycache__", "node_modules", "artifacts", "build", ".git", "vendor"}
    return sorted(
        file
        for part in [*SOURCES, "tests"]
        for file in (ROOT / part).rglob("*")
        if file.suffix in suffixes and file.is_file() and not left_out & set(file.relative_to(ROOT).parts)
    )


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="The code in figures.")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    figures: dict[str, dict[str, int]] = {
        "lines": lines_of_parts(),
        "functions over 60 lines": long_functions(),
        "files over 600 lines": long_files(),
        "layers of carme": {", ".join(layer): len(layer) for layer in layers()},
        "circles of imports": {" <-> ".join(modules): len(modules) for modules in circles()},
        "circles with imports for type checkers": {
            " <-> ".join(modules): len(modules) for modules in circles(with_types=True)
        },
    }
    if parser.parse_args().json:
        print(json.dumps(figures, indent=2))
        return 0
    for title, values in figures.items():
        print(f"{title}: {sum(values.values()) if title == 'lines' else len(values)}")
        for name, number in sorted(values.items(), key=lambda row: -row[1]):
            print(f"  {number:6} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
