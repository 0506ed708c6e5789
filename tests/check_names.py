"""Refuse names that stand for nothing in the field: `python tests/check_names.py`, part of `./test lint`.

Each banned word, or pair of words, has the words that replace it. What is left of earlier names is counted in
LEFT, per word; a new one fails, and a number that is too high is named so that it can be lowered. Modules,
functions, classes, arguments and variables count, where they are defined, and so do texts of the product that
are names themselves: keys, kinds, addresses, entries of `__all__`. In C, C++ and JavaScript all names
outside of comments and texts count. EARLIER has what must stay.

In C and C++ the words of IN_C are refused as well, and lines of more than LONGEST characters; in Python
ruff refuses these.

Words of WHOLE are refused where they are the whole name of a function or class of the product. In each folder
of CLEARED, its words are refused as the whole name of anything, also in C++: a variable, parameter or
attribute too, and what `import`, `except` or `case` gives a name.

Words and phrases of IN_PROSE are refused in sentences, too: in comments, docstrings and messages of Python,
in pages of documentation, and in templates, scripts and configuration. There a program reports, prints,
notifies or queries.
"""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import c_functions

ROOT = Path(__file__).resolve().parent.parent

INSTEAD = {
    "aftermath": "accounting lookup",
    "asked": "requested, options",
    "bringer": "stage-in job",
    "caretaker": "orphan cleanup",
    "crew": "worker pool",
    "deed": "action, audit entry",
    "desk": "services",
    "errand": "background task",
    "errands": "background tasks",
    "keeper": "sync, reconcile",
    "kept": "cache, snapshot, saved",
    "led": "node preference",
    "outlook": "start estimate",
    "prospect": "start estimate",
    "prospects": "start estimates",
    "said": "message, text",
    "showing": "end-to-end",
    "showings": "end-to-end",
    "strangers": "unauthenticated peers",
    "take_in": "onboard",
    "takein": "onboard",
    "tell": "notify, report",
    "told": "reported, published",
    "wish": "request, options",
    "wishes": "requested, options",
}

#: What functions and classes of the product are not called, whatever underscores are before it.
WHOLE = {
    "look": "poll, read, sample, snapshot",
    "made": "what it makes: build_pipeline",
    "one": "what it is: job, node, row",
    "other": "what it is: job, node, row",
}

#: What nothing is called, underscores apart, in the folders that have none of it left.
VARIABLES = {
    **WHOLE,
    **{word: INSTEAD[word] for word in ("asked", "kept", "led", "said", "told", "wishes")},
    "heard": "reported_at, last_contact",
    "it": "what it is: job, node, row",
    "looked": "examined, measured_at",
    "looks": "polls, samples",
    "mine": "own, or what it is: own_jobs",
    "others": "what they are: nodes, aliases, candidates",
    "ours": "what they are: carme_jobs, copies",
    "say": "log, report, write",
    "theirs": "what they are: sources, current",
    "thing": "what it is: value, resource",
    "things": "what they are: values",
    "way": "mode, channel, option, direction",
    "ways": "modes, commands, options, directions",
    "whom": "target, user",
    "whose": "owner, labels",
}
#: Pronouns and vague words that are not names either in the folders that have none of them left.
VAGUE = {
    "about": "header, description, identity",
    "anything": "what it is: placeholder, any_token",
    "both": "pair, or what they are: challenges, windows",
    "everyone": "world_group, peers, gathered, by_rank",
    "everything": "entries, gathered",
    "given": "arguments, inputs, requested, sources",
    "here": "own_host, local_size, is_local",
    "how": "ending, method, detail",
    "me": "own_rank, own_node",
    "news": "notifier, notification, message",
    "nothing": "empty, absent, no_operation",
    "several": "has_peers, entries, sequence",
    "some": "subset, selected",
    "there": "remote_offset, present, descriptions",
    "what": "operation, kind, title, subject, reason",
    "which": "index, mismatch, kind",
    "who": "peer, client",
    "why": "reason",
}
_NAMELESS = {**VARIABLES, **VAGUE}

#: What no name in C and C++ has as a word.
IN_C = {
    "absorb": "accumulate",
    "crowded": "oversubscribed",
    "farewell": "shutdown, drain",
    "given": "argument, arguments",
    "kick": "wakeup",
    "lean": "pair, remainder",
    "leaning": "remainder",
    "letter": "message, point_to_point",
    "letters": "messages, point_to_point",
    "looker": "thread",
    "lookers": "threads",
    "manner": "options",
    "most": "max",
    "nap": "sleep, interval",
    "note": "notification, or what it does: record_scan",
    "notice": "notification",
    "patience": "time_limit, timeout",
    "patient": "busy_poll, is_foreground",
    "postman": "sender_thread",
    "settle": "decode, store",
    "stranger": "unauthenticated peer",
    "theirs": "remote, source",
    "trade": "exchange",
    "trouble": "failure, kind",
    "uncopied": "zero_copy",
    "unite": "reduce, combine",
    "whole": "entire, complete",
}
#: What makes C and C++ files, and how long their lines are at most.
C_SUFFIXES = (".c", ".h", ".cpp", ".hpp")
LONGEST = 110
#: Which of these words a folder has none of.
CLEARED: dict[str, Collection[str]] = {
    **dict.fromkeys(("ansible", "carme", "monitoring", "spawner", "tests", "webui"), VARIABLES.keys()),
    "containers": VARIABLES.keys(),
    "containers/runtime": VAGUE.keys(),
}

#: Earlier names that still work and warn, parameters that programs may name, and what is in databases,
#: journals and pickles: each with its files' ends.
EARLIER = {
    "_made": ("torch/stepping.py",),
    "asked_once": ("projects/models.py",),
    "everyone": ("gaspi/process.py",),
    "kept": ("petri/memory.py", "petri/ranges.py"),
    "others": ("out_of_core/plan.py",),
    "take_in": ("client/admin.py", "commands/take_in.py"),
    "tell": ("carme_runtime/progress.py",),
    "told_once": ("profile/models.py",),
    "what": ("scaling/prediction.py",),
    "which": ("petri/memory.py",),
}

#: What sentences of comments, docstrings and pages do not have, with what they have instead.
IN_PROSE = {
    **{
        word: INSTEAD[word]
        for word in ("aftermath", "bringer", "caretaker", "crew", "deed", "desk", "errand")
    },
    **{
        word: INSTEAD[word] for word in ("errands", "keeper", "outlook", "prospect", "prospects", "strangers")
    },
    "asked": "requested, queried, invited",
    "led": "redirected, resulted in",
    "looked at": "checked, read, examined",
    "of which": "some of them, each of them, whose, that ... of",
    "of whom": "some of them, each of them, whose",
    "lest": "so that ... not",
    "said": "reported, printed, given",
    "telling": "reporting, notifying",
    "tells": "reports, prints, notifies",
    "told": "reported, notified",
    "whoever": "anyone who",
    "wish": "request, hint",
    "wishes": "requests, options",
}
#: Pages with earlier names.
HISTORY = ("CHANGELOG.md",)

NAME = re.compile(r"[A-Za-z_]\w*(?:-\w+)*")

#: Files in which names are found as words; other people's are in `vendor`.
OTHER_SUFFIXES = (".c", ".h", ".cpp", ".hpp", ".js")
#: The use of a member, which other libraries may have named: `error.what()`.
_MEMBER = re.compile(r"(?:\.|->)[A-Za-z_]\w*")

#: Files whose text as a whole counts as sentences; their names have no words of IN_PROSE either.
TEXTS = (
    *("*.md", "*.html", "*.js", "*.css", "*.yml", "*.j2", "*.toml", "*package.json"),
    *(f"*{suffix}" for suffix in C_SUFFIXES),
)

#: How many definitions still have the word. Lower a number when names are gone; never raise one.
LEFT: dict[str, int] = {}


class Names(NamedTuple):
    """Names in a module of Python, each with its line.

    Args:
        definitions: All that it defines.
        blocks: Functions and classes among them.
        texts: Texts that are names.
    """

    definitions: list[tuple[str, int]]
    blocks: list[tuple[str, int]]
    texts: list[tuple[str, int]]


@functools.cache
def names_of(source: str) -> Names:
    """The names in the source of a module.

    But for `other` as the parameter of operators such as `__eq__`, as Python's documentation writes them. To
    parse all modules takes most of the time of this program, so each is parsed once for all that it looks at.
    """
    found = Names([], [], [])
    operands: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:  # the most frequent ones come first
            case ast.expr_context():
                pass
            case ast.Name(name, context) | ast.Attribute(_, name, context):
                if isinstance(context, ast.Store):
                    found.definitions.append((name, node.lineno))
            case ast.Constant(value):
                if isinstance(value, str) and NAME.fullmatch(value):
                    found.texts.append((value, node.lineno))
            case ast.arg():
                if id(node) not in operands:
                    found.definitions.append((node.arg, node.lineno))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.definitions.append((node.name, node.lineno))
                found.blocks.append((node.name, node.lineno))
                if isinstance(node, ast.FunctionDef) and re.fullmatch("__[a-z]+__", node.name):
                    operands |= {id(arg) for arg in node.args.args if arg.arg == "other"}
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                found.definitions.append((name, node.lineno))
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.definitions.append((name, node.lineno))
            case ast.MatchMapping(rest=str(name)):
                found.definitions.append((name, node.lineno))
    return found


def variables(file: str, source: str) -> Iterator[tuple[str, int]]:
    """Names of Python that a module defines, and those in C++ that are not members of an object, likewise."""
    if file.endswith(".py"):
        yield from names_of(source).definitions
    else:
        yield from names_in_code(_MEMBER.sub("", c_functions.code_of(source)))


def names_in_code(source: str) -> Iterator[tuple[str, int]]:
    """Names in C, C++ or JavaScript, each with its line."""
    for line, text in enumerate(c_functions.code_of(source).splitlines(), 1):
        yield from ((name, line) for name in re.findall(r"[A-Za-z_]\w*", text))


def sentences(source: str) -> Iterator[tuple[str, int]]:
    """Comments and docstrings of a Python module, each with its first line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string, token.start[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str(text), lineno=line)), *_]:
                    yield text, line


def messages(source: str) -> Iterator[tuple[str, int]]:
    """Texts of a Python module that are not docstrings and have several words, each with its first line."""
    tree = ast.parse(source)
    described = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in described and len(text.split()) > 1:
                yield text, node.lineno


def _prose_of(file: str, source: str) -> Iterator[tuple[str, int]]:
    """What people read of a file, each text with its first line."""
    if not file.endswith(".py"):
        yield source, 1
        return
    yield from sentences(source)
    if not file.startswith("tests/") and "/migrations/" not in file:
        yield from messages(source)


def found_in_prose() -> list[str]:
    """Where sentences have a word of IN_PROSE, as `file:line: word. Write: ...`."""
    phrases = "|".join(IN_PROSE).replace(" ", r"[\s#]+")  # also over the end of a line
    pattern = re.compile(rf"(?<![\w`'\"{{-])({phrases})(?![\w`'\"-])", re.IGNORECASE)
    found = []
    for file in _listed("*.py", *TEXTS):
        source = (ROOT / file).read_text()
        if Path(file).name in HISTORY or not pattern.search(source):
            continue
        for text, first in _prose_of(file, source):
            for match in pattern.finditer(text):
                line = first + text.count("\n", 0, match.start())
                phrase = " ".join(re.split(r"[\s#]+", match[0]))
                found.append(f"{file}:{line}: {phrase!r}. Write: {IN_PROSE[phrase.lower()]}.")
    return found


def found_whole() -> list[str]:
    """Functions and classes of the product whose whole name is a word of WHOLE, likewise."""
    return [
        f"{file}:{line}: {name!r}. Write: {WHOLE[name.strip('_').lower()]}."
        for file in _listed("*.py")
        if not file.startswith("tests/")
        for name, line in names_of((ROOT / file).read_text()).blocks
        if name.strip("_").lower() in WHOLE and not file.endswith(EARLIER.get(name, ()))
    ]


def found_variables() -> list[str]:
    """Names of the folders of CLEARED that are one of its words as a whole, likewise."""
    return [
        f"{file}:{line}: {name!r}. Write: {_NAMELESS[name.strip('_').lower()]}."
        for folder, words in CLEARED.items()
        for file in _listed(f"{folder}/*.py", *(f"{folder}/*{suffix}" for suffix in C_SUFFIXES))
        for name, line in variables(file, (ROOT / file).read_text())
        if name.strip("_").lower() in words and "/migrations/" not in file
        if not file.endswith(EARLIER.get(name, ()))
    ]


def found_in_c() -> list[str]:
    """Names of C and C++ with a word of IN_C, and lines that are too long, likewise."""
    found = []
    for file in _listed(*(f"*{suffix}" for suffix in C_SUFFIXES)):
        source = (ROOT / file).read_text()
        for name, line in names_in_code(source):
            words = {word.lower() for word in re.split(r"_|(?<=[a-z0-9])(?=[A-Z])", name)}
            found += [f"{file}:{line}: {name!r}. Write: {IN_C[word]}." for word in words & IN_C.keys()]
        found += [
            f"{file}:{line}: {len(text)} characters. Write: at most {LONGEST}."
            for line, text in enumerate(source.splitlines(), 1)
            if len(text) > LONGEST
        ]
    return found


@functools.cache
def words_of(name: str) -> set[str]:
    """The words of a name, and its pairs of words, whichever way it joins them."""
    words = [word.lower() for word in re.split(r"[_-]|(?<=[a-z0-9])(?=[A-Z])", name) if word]
    return {*words, *(f"{first}_{second}" for first, second in pairwise(words))}


def found() -> dict[str, list[str]]:
    """Where each banned word stands, as `file:line: name`; a name counts once in each file."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in _listed("*.py", *(f"*{suffix}" for suffix in OTHER_SUFFIXES)):
        first: dict[str, int] = {}
        for name, line in [(Path(file).stem, 1), *_names_in(file, (ROOT / file).read_text())]:
            if not file.endswith(EARLIER.get(name, ())):
                first.setdefault(name, line)
        for name, line in first.items():
            for word in words_of(name) & INSTEAD.keys():
                places[word].append(f"{file}:{line}: {name}")
    return places


def _listed(*patterns: str) -> list[str]:
    """Our files of these names that are there."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    # One that was removed is listed until git knows it; vendored ones are not ours.
    return [file for file in listed.stdout.splitlines() if (ROOT / file).exists() and "/vendor/" not in file]


def _names_in(file: str, source: str) -> Iterator[tuple[str, int]]:
    """The names in a file that count, each with its line."""
    if not file.endswith(".py"):
        yield from names_in_code(source)
        return
    names = names_of(source)
    yield from names.definitions
    if not file.startswith("tests/") and "/migrations/" not in file:
        yield from names.texts


def main() -> int:
    """Compare what is there with what is left; the exit code says whether a banned word is new."""
    places, failed = found(), False
    for word, instead in INSTEAD.items():
        count, left = len(places[word]), LEFT.get(word, 0)
        if count > left:
            failed = True
            print(f"{count} names have the word {word!r}, {left} were left. Write: {instead}.")
            print("\n".join(f"  {place}" for place in places[word]))
        elif count < left:
            print(f"Only {count} names have the word {word!r} now: lower it in LEFT from {left}.")
    if whole := sorted({*found_whole(), *found_variables(), *found_in_c()}):
        failed = True
        print("Names that say nothing:", *whole, sep="\n  ")
    if sentences_with := found_in_prose():
        failed = True
        print("Sentences with words of another meaning:", *sentences_with, sep="\n  ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
