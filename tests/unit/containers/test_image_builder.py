"""Which images are built of what, and when: layers of libraries below, what this project brings above."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from image_builder import builder as builder_module
from image_builder import command, definitions
from image_builder.builder import Builder
from image_builder.cache import Cache
from image_builder.definitions import Definition, image_names, in_order
from image_builder.errors import BuildError

IMAGES = Path(definitions.HERE)


def test_users_see_images_and_no_layers() -> None:
    assert image_names(definitions.definitions()) == [
        *("base", "dask", "mxnet", "ray", "tensorflow", "torch", "vscode"),
    ]


def test_an_image_comes_after_all_that_it_derives_from() -> None:
    order = [definition.name for definition in in_order(["vscode", "torch"], definitions.definitions())]
    assert order == ["base_libraries", "torch_libraries", "vscode_libraries", "vscode", "torch"]


def test_apptainer_fills_in_every_name() -> None:
    """It takes letters, digits and underscores in double braces, and refuses arguments of other names."""
    for definition in definitions.definitions().values():
        assert all(re.fullmatch(r"\w+", name) for name in definition.arguments), definition.name


def test_no_layer_copies_what_this_project_changes_often() -> None:
    layers = [each for each in definitions.definitions().values() if each.is_layer]
    assert layers
    for layer in layers:
        assert not {"carme", "runtime", "spawner", "examples", "platform"} & set(layer.sources), layer.name


def test_an_unknown_image_is_refused_with_those_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = command.main(["jax", "--output", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")])
    assert code == 1
    known = "base, dask, mxnet, ray, tensorflow, torch, vscode"
    expected = f"There is no image called 'jax'. Choose from {known}, or add jax.def."
    assert expected in capsys.readouterr().err


def test_an_image_that_derives_from_itself_is_refused() -> None:
    loop = Definition(IMAGES / "loop.def", "From: {{ loop }}")
    with pytest.raises(BuildError, match="'loop' derives from itself"):
        in_order(["loop"], {"loop": loop})


class Recorder(Builder):
    """A builder that writes a few bytes where the real one runs Apptainer, and records what it made."""

    built: list[str]

    def make(self, definition: Definition, key: str):
        """Stands for Apptainer."""
        self.built.append(definition.name)
        with self.cache.adding(definition.name, key, ".sif") as file:
            file.write_text(f"{definition.name} {key}")
        return self.added(definition.name, key, ".sif")

    def packages(self, image: Path) -> dict[str, str]:
        """Stands for the list of packages in the image."""
        return {"numpy": "2.0"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that stand for this project's sources, so that a test can change one."""
    folder = tmp_path / "project"
    for name in definitions.SOURCES:
        (folder / name).mkdir(parents=True)
        (folder / name / "a.py").write_text("first\n")
    monkeypatch.setattr(builder_module, "SOURCES", {name: folder / name for name in definitions.SOURCES})
    return folder


def build(tmp_path: Path, *names: str) -> list[str]:
    """Build images; return the names of what was not in the cache."""
    options = command.parse([*names, "--output", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")])
    recorder = Recorder(options)
    recorder.built = []
    for definition in in_order(list(names), definitions.definitions()):
        recorder.build(definition)
    return recorder.built


def test_a_change_of_our_own_parts_leaves_the_libraries_alone(tmp_path: Path, project: Path) -> None:
    assert build(tmp_path, "base", "torch") == ["base_libraries", "base", "torch_libraries", "torch"]
    assert build(tmp_path, "base", "torch") == []
    (project / "carme" / "a.py").write_text("second\n")
    assert build(tmp_path, "base", "torch") == ["base", "torch"]
    (project / "finish" / "a.py").write_text("second\n")
    assert build(tmp_path, "base", "torch") == ["base_libraries", "base", "torch_libraries", "torch"]


def test_layers_are_not_published(tmp_path: Path, project: Path) -> None:
    build(tmp_path, "torch")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["torch.json", "torch.sif"]
    manifest = json.loads((tmp_path / "out/torch.json").read_text())
    assert (manifest["title"], manifest["packages"]) == ("PyTorch", {"numpy": "2.0"})


def test_a_damaged_file_of_the_cache_is_built_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with cache.adding("base", "0" * 16, ".sif") as file:
        file.write_text("whole")
    entry = cache.find("base", "0" * 16, ".sif")
    assert entry is not None
    entry.file.write_text("half")
    assert cache.find("base", "0" * 16, ".sif") is None


def test_the_command_runs_without_any_package_installed() -> None:
    answer = subprocess.run(
        ["/usr/bin/env", "-i", "python3", "-E", "-s", str(IMAGES / "build"), "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "--torch-index" in answer.stdout
