"""Data that jobs stage to their nodes, and the catalogue of datasets."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from carme.datasets import Datasets, readers, unpack
from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.jobs import JobRequest, SessionOptions, Stage, parse_stages, stage_text


@pytest.fixture
def datasets(tmp_path: Path) -> Datasets:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/one").write_text("1")
    (tmp_path / "data/two").write_text("22")
    found = Datasets(tmp_path / "site", tmp_path / "own")
    found.add("mnist", str(tmp_path / "data"), site=True, title="Digits", licence="CC0")
    return found


def test_stages_are_parsed_into_target_source_and_name(datasets: Datasets, tmp_path: Path) -> None:
    version = datasets.get("mnist").version()
    stages = parse_stages(
        f"scratch:/data/imagenet/ mnist ram:/data/a:b local:mnist2@{version.short[:6]}",
        _two(datasets, tmp_path),
    )
    assert [(stage.target, stage.source, stage.name) for stage in stages] == [
        ("scratch", "/data/imagenet", "imagenet"),
        ("local", str(tmp_path / "data"), "mnist"),
        ("ram", "/data/a:b", "a-b"),
        ("local", str(tmp_path / "data"), "mnist2"),
    ]
    assert stages[1].version == version.digest and stages[0].version == ""
    # Copies are known by what is copied, not by what a job calls it.
    assert stages[1].key == stages[3].key != stages[0].key
    assert parse_stages(stage_text(stages[:1]), datasets) == stages[:1]


def test_folders_with_spaces_are_quoted(datasets: Datasets) -> None:
    parts = ["/scratch/e f", "ram:/data/a, b", "mnist"]
    stages = parse_stages(parts, datasets)
    assert [stage.source for stage in stages[:2]] == ["/scratch/e f", "/data/a, b"]
    assert [stage.name for stage in stages] == ["e-f", "a--b", "mnist"]
    assert parse_stages('"/scratch/e f", ram:"/data/a, b" mnist', datasets) == stages
    assert parse_stages(stage_text(stages[:2]), datasets) == stages[:2]


def _two(datasets: Datasets, tmp_path: Path) -> Datasets:
    datasets.add("mnist2", str(tmp_path / "data"))
    return datasets


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tape:/data", "names the target 'tape'; there are: local, scratch"),
        ("imagenet", "no dataset 'imagenet'; there are: mnist"),
        ("mnist@ffffff", "no version 'ffffff'"),
        ("/data/x ram:/other/x", "names 'x' twice"),
        ("../data", "no dataset '../data'"),
        ("local:", "no dataset ''"),
        ('"/data/x', "A quotation mark is not closed."),
    ],
)
def test_wrong_words_are_named(datasets: Datasets, text: str, words: str) -> None:
    with pytest.raises(CarmeError) as caught:
        parse_stages(text, datasets)
    assert words in str(caught.value)


def test_requests_refuse_what_no_node_can_read() -> None:
    requested = {"name": "a", "kind": "batch", "command": ["x"], "minutes": 1}
    for stage in (
        {"source": "data"},
        {"source": "/a\nb"},
        {"source": "/a", "target": "tape"},
        {"source": "/a", "x": 1},
    ):
        with pytest.raises(InvalidRequest):
            JobRequest.read({**requested, "stage": [stage]})
    with pytest.raises(InvalidRequest):
        JobRequest.read({**requested, "results": "results"})
    with pytest.raises(InvalidRequest):
        JobRequest.read({**requested, "stage": [{"source": f"/{number}"} for number in range(17)]})
    options = SessionOptions(image="base", minutes=5, stage=[Stage(source="/data/x")], results="/home/a/out")
    again = SessionOptions.read(json.loads(options.model_dump_json()))
    request = again.request(name="s", command=["x"], environment={})
    assert again == options and request.stage == options.stage and request.results == "/home/a/out"


def test_a_changed_dataset_gets_a_new_version(datasets: Datasets, tmp_path: Path) -> None:
    first = datasets.get("mnist")
    assert (first.version().files, first.version().size, first.licence) == (2, 3, "CC0")
    _, new = datasets.add("mnist", str(tmp_path / "data"), site=True)
    assert not new and len(datasets.get("mnist").versions) == 1
    (tmp_path / "data/two").write_text("23")
    second, new = datasets.add("mnist", str(tmp_path / "data"), site=True)
    assert new and len(second.versions) == 2 and second.title == "Digits"
    assert second.version(first.version().short).digest == first.version().digest != second.version().digest
    # The same files elsewhere, written in another order, are the same version.
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/two").write_text("23")
    (tmp_path / "moved/one").write_text("1")
    moved, _ = datasets.add("moved", str(tmp_path / "moved"))
    assert moved.version().digest == second.version().digest
    assert datasets.names() == ["mnist", "moved"]
    datasets.remove("moved")
    with pytest.raises(NotFound):
        datasets.remove("moved")
    assert (tmp_path / "moved/one").exists()


def test_a_dataset_with_a_wrong_name_or_folder_is_refused(datasets: Datasets, tmp_path: Path) -> None:
    for name, folder, words in [
        ("a/b", tmp_path / "data", "not a valid name of a dataset"),
        ("a", tmp_path / "nowhere", "There is no folder"),
        ("a", tmp_path / "site", ""),
    ]:
        if words:
            with pytest.raises(CarmeError, match=words):
                datasets.add(name, str(folder))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="no files"):
        datasets.add("a", str(tmp_path / "empty"))
    (tmp_path / "site/broken.json").write_text("{")
    with pytest.raises(CarmeError, match="Add the dataset again"):
        datasets.get("broken")
    assert [dataset.name for dataset in datasets.all()] == ["mnist"]


def test_the_readers_of_a_folder_are_described(tmp_path: Path) -> None:
    for mode, words in ((0o755, "everybody"), (0o750, "group "), (0o700, "")):
        tmp_path.chmod(mode)
        assert readers(str(tmp_path)).startswith(words) and (readers(str(tmp_path)) == "everybody") == (
            mode == 0o755
        )
    assert readers("/nowhere") == "not there"
    assert os.path.isdir(tmp_path)  # noqa: PTH112


def _tar(path: Path, *members: tarfile.TarInfo) -> str:
    with tarfile.open(path, "w:xz") as packed:
        for member in members:
            member.size = 1 if member.isreg() else 0
            packed.addfile(member, io.BytesIO(b"x"))
    return str(path)


def test_archives_become_folders(tmp_path: Path) -> None:
    packed = _tar(tmp_path / "a.tar.xz", tarfile.TarInfo("inside/one"), tarfile.TarInfo("inside/sub/two"))
    assert unpack(packed) == str(tmp_path / "a")
    assert (tmp_path / "a/one").read_text() == (tmp_path / "a/sub/two").read_text() == "x"
    with pytest.raises(InvalidRequest, match="already exists"):
        unpack(packed)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as zipped:
        zipped.writestr("one", "1")
        zipped.writestr("../../outside", "2")
    assert unpack(str(tmp_path / "b.zip"), str(tmp_path / "other/b")) == str(tmp_path / "other/b")
    assert sorted(os.listdir(tmp_path / "other/b")) == ["one", "outside"]  # noqa: PTH208
    assert not (tmp_path / "outside").exists()


def test_unsafe_and_broken_archives_are_refused(tmp_path: Path) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "outside")
    whole = _tar(tmp_path / "whole.tar.xz", tarfile.TarInfo("one"))
    cut = tmp_path / "cut.tar.xz"
    cut.write_bytes(Path(whole).read_bytes()[:-40])
    (tmp_path / "text.tar").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as zipped:
        zipped.writestr("one", "1")
    plain = (tmp_path / "plain.zip").read_bytes()
    local, central = 0, plain.index(b"PK\x01\x02")
    for name, offset, value in (("password.zip", 6, 1), ("unknown.zip", 8, 97)):
        # The same two bytes stand before the file and in the list at the end (APPNOTE, 4.3.7 and 4.3.12).
        strange = bytearray(plain)
        for place in (local + offset, central + offset + 2):
            strange[place : place + 2] = value.to_bytes(2, "little")
        (tmp_path / name).write_bytes(strange)
    for archive in (
        _tar(tmp_path / "up.tar", tarfile.TarInfo("../up")),
        _tar(tmp_path / "link.tar", link, tarfile.TarInfo("link/x")),
        str(cut),
        str(tmp_path / "text.tar"),
        str(tmp_path / "password.zip"),
        str(tmp_path / "unknown.zip"),
    ):
        with pytest.raises(CarmeError, match="cannot be unpacked"):
            unpack(archive)
    left = {path.name for path in tmp_path.iterdir()}
    zips = {"plain.zip", "password.zip", "unknown.zip"}
    assert left == {"whole.tar.xz", "cut.tar.xz", "text.tar", "up.tar", "link.tar"} | zips
