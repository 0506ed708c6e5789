"""The lint of names finds a banned word wherever a name stands."""

import subprocess
from pathlib import Path

import check_names
import pytest


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("asked_for", "asked"),
        ("BookingWish", "wish"),
        ("take-in", "take_in"),
        ("takeIn", "take_in"),
        ("take_in_user", "take_in"),
    ],
)
def test_a_word_is_found_however_a_name_joins_it(name: str, word: str) -> None:
    assert word in check_names.words_of(name) & check_names.INSTEAD.keys()
    assert not check_names.words_of("take_over_the_inlet") & check_names.INSTEAD.keys()


def test_texts_that_are_names_count_and_sentences_do_not() -> None:
    source = 'path("session-prospect")\nvalues = {"asked": 1}\nprint("You are asked twice.")\n'
    assert check_names.names_of(source).texts == [("session-prospect", 1), ("asked", 2)]


def test_names_in_other_languages_count_and_their_comments_do_not() -> None:
    source = '// It was told\nint told_to_end = 1; /* asked */ puts("kept");\n'
    words = {word for name, _ in check_names.names_in_code(source) for word in check_names.words_of(name)}
    assert words & check_names.INSTEAD.keys() == {"told"}


def test_banned_words_are_found_in_comments_docstrings_and_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text(
        '"""Says what it was\ntold."""\nkept = "It said so."  # Whoever wrote `told`\n\n'
        'def f():\n    """Its wish-list."""\n    return "told"  # fine\n'
    )
    (tmp_path / "page.md").write_text("Slurm\ntells it, some of\nwhich is there.\n")
    (tmp_path / "page.html").write_text('<p class="told">\nIt was told.</p>\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/b.py").write_text('words = "It said {told}."\n')
    (tmp_path / "CHANGELOG.md").write_text("It was told.\n")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    found = [place.rpartition(". Write")[0] for place in check_names.found_in_prose()]
    assert found == [
        "a.py:3: 'Whoever'", "a.py:2: 'told'", "a.py:3: 'said'", "page.html:2: 'told'", "page.md:2: 'tells'",
        "page.md:2: 'of which'",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["def look", "async def _look", "class Look", "def one"])
def test_a_function_or_class_says_what_it_does_or_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    colon = ":" if name.startswith("class") else "():"
    (tmp_path / "tests").mkdir()
    for file in ("a.py", "tests/a.py"):
        (tmp_path / file).write_text(f"one = 1\n\n\n{name}{colon}\n    pass\n")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    found = check_names.found_whole()
    assert [place.rpartition(". Write")[0] for place in found] == [f"a.py:4: {name.split()[-1]!r}"]


@pytest.mark.parametrize(
    "lines",
    [
        "one = 1",
        "def f(made): ...",
        "self._ways = 1",
        "for _thing in x: ...",
        "import os as it",
        "from os import path as way",
        "try: ...\nexcept OSError as whose: ...",
        "match x:\n    case 1 as mine: ...",
        "match x:\n    case [*theirs]: ...",
        "match x:\n    case {**others}: ...",
    ],
)
def test_in_cleared_folders_a_variable_says_what_it_holds(
    lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("carme/a.py", "elsewhere/a.py"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(f"{lines}\nnode, others_of = 1, 2\n")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    (found,) = check_names.found_variables()
    assert found.startswith(f"carme/a.py:{len(lines.splitlines())}: ")


def test_in_cleared_folders_a_variable_of_cpp_says_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "containers").mkdir()
    source = '// its way\nint theirs_ = 0;\nputs(error.what());\nputs("it");\nnode->mine = 2;\n'
    (tmp_path / "containers/a.hpp").write_text(source)
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    (found,) = check_names.found_variables()
    assert found.startswith("containers/a.hpp:2: 'theirs_'")


def test_what_may_stay_is_there() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=check_names.ROOT, check=True, capture_output=True, text=True
    )
    for name, ends in check_names.EARLIER.items():
        for end in ends:
            files = [check_names.ROOT / file for file in listed.stdout.splitlines() if file.endswith(end)]
            names: set[str] = set()
            for file in files:
                found = check_names.names_of(file.read_text())
                names |= {file.stem, *(each for each, _ in (*found.definitions, *found.texts))}
            assert name in names, (name, end)


def test_in_the_runtime_no_pronoun_stands_for_a_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "containers/runtime").mkdir(parents=True)
    (tmp_path / "containers/runtime/a.py").write_text(
        "def send(what, given):\n    mine = what\n    for other in given:\n        _there = other\n\n\n"
        "class Part:\n    def __eq__(self, other): ...\n\n    def is_like(self, other): ...\n"
    )
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    found = [place.rpartition(". Write")[0].rpartition("/")[2] for place in check_names.found_variables()]
    assert sorted(found) == [
        "a.py:10: 'other'", "a.py:1: 'given'", "a.py:1: 'what'", "a.py:2: 'mine'", "a.py:3: 'other'",
        "a.py:4: '_there'",
    ]  # fmt: skip


def test_in_c_neither_our_own_words_nor_long_lines_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members count as well; parts of other words, comments and texts do not."""
    source = (
        '// crowded\nint crowded_;\nenum class Trouble { a };\nputs("nap");\nint napkin = x->most_rows;\n'
    )
    (tmp_path / "a.cpp").write_text(f"{source}//{'-' * 109}\n//{'-' * 108}\n")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    found = [place.rpartition(". Write")[0] for place in check_names.found_in_c()]
    assert found == [
        "a.cpp:2: 'crowded_'", "a.cpp:3: 'Trouble'", "a.cpp:5: 'most_rows'", "a.cpp:6: 111 characters",
    ]  # fmt: skip


def test_sentences_of_c_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.c").write_text("/* It was told. */\n")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    (found,) = check_names.found_in_prose()
    assert found.startswith("a.c:1: 'told'")
