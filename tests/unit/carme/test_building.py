"""What builds a user's own image, with a stand-in of Apptainer that records its calls."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from carme.errors import CarmeError, InvalidRequest
from carme.images import ImageCatalogue, ImageFile, building
from carme.images.building import ImageRecipe, build, check_text
from carme.jobs import JobRequest, SessionOptions
from carme.slurm.label import Label

DIGEST = f"sha256:{'0' * 64}"
STAND_IN = """\
#!{python} -IS
import json, shutil, sys
from pathlib import Path
here = Path(__file__).parent
words = sys.argv[1:]
with (here / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words[0] == "build":
    if (here / "fails").exists():
        sys.exit(255)
    shown = Path(words[words.index("--bind") + 1].removesuffix(":/mnt"))
    for name in ("requirements.txt", "pip.conf"):
        shutil.copy(shown / name, here / name)
    shutil.copy(words[-1], here / "image.def")
    Path(words[-2]).write_bytes(b"an image")
elif words[0] == "inspect":
    print((here / "labels").read_text())
elif "pip" in words:
    print('[{{"name": "NumPy", "version": "2.1"}}, {{"name": "abc", "version": "1"}}]')
elif "ls" in words:
    print("board")
else:
    sys.exit((here / "lacks").exists() and words[-1] == (here / "lacks").read_text())
"""


class Node:
    """Where the job runs."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "bin"
        self.programs.mkdir()
        (self.programs / "apptainer").write_text(STAND_IN.format(python=sys.executable))
        (self.programs / "apptainer").chmod(0o755)
        self.labels({"carme.description": "Mine.", "carme.entry-point.lab": "JupyterLab"})
        (folder / "site").mkdir()
        for name in ("base", "torch"):
            (folder / f"site/{name}.sif").touch()
            (folder / f"site/{name}.json").write_text(json.dumps({"title": name, "digest": DIGEST}))
        self.site = ImageCatalogue(folder / "site")
        self.target = folder / "home/images/mine.sif"

    def labels(self, labels: dict[str, str]) -> None:
        (self.programs / "labels").write_text(json.dumps({"data": {"attributes": {"labels": labels}}}))

    def read(self, name: str) -> str:
        return (self.programs / name).read_text()

    def recipe(self, **values: Any) -> ImageRecipe:
        given: dict[str, Any] = {"kind": "requirements", "text": "numpy\n", "base": "torch"}
        given["file"] = str(self.target)
        return ImageRecipe(**(given | values))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    found = Node(tmp_path)
    monkeypatch.setenv("PATH", f"{found.programs}:{os.environ['PATH']}")
    return found


def test_requirements_become_an_image_with_its_digest_and_packages(node: Node) -> None:
    nasty = "numpy\n$(touch /tmp/x); ' {{ base }}\n"
    built = build(node.recipe(text=nasty), node.site)
    assert built.digest == "sha256:" + hashlib.sha256(b"an image").hexdigest()
    assert built.packages == {"abc": "1", "NumPy": "2.1"} and built.size == 8
    assert node.target.read_bytes() == b"an image"
    assert node.target.stat().st_mode & 0o777 == 0o600
    assert node.target.parent.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in node.target.parent.iterdir()] == ["mine.sif"]
    # What the user wrote is a file for pip, and no part of what runs.
    assert node.read("requirements.txt") == nasty + "\n" and "touch" not in node.read("image.def")
    words = json.loads(node.read("calls.jsonl").splitlines()[0])
    assert f"torch={node.site.directory}/torch.sif" in words
    assert not any(word.startswith("base=") for word in words)


def test_a_definition_is_built_as_it_is_from_the_sites_images(node: Node) -> None:
    text = "Bootstrap: localimage\nFrom: {{ base }}\n# {{ torch }}\n%post\n  {{ other }}\n"
    node.labels({"carme.entry-point.board": "Board", "carme.entry-point.gone": "Gone", "x": "y"})
    built = build(node.recipe(kind="definition", text=text, base="", shared=True), node.site)
    assert node.read("image.def") == text
    assert built.entry_points == {"board": "Board"}
    assert node.target.stat().st_mode & 0o777 == 0o644
    words = json.loads(node.read("calls.jsonl").splitlines()[0])
    assert [word for word in words if word.endswith(".sif") and "=" in word] == [
        f"base={node.site.directory}/base.sif"
    ]


def test_nothing_is_left_of_a_build_that_fails(node: Node) -> None:
    (node.programs / "fails").touch()
    with pytest.raises(CarmeError, match="failed with exit code 255"):
        build(node.recipe(), node.site)
    (node.programs / "fails").unlink()
    (node.programs / "lacks").write_text("carme-singleuser")
    with pytest.raises(CarmeError, match="has no carme-singleuser"):
        build(node.recipe(), node.site)
    assert not node.target.parent.exists()


def test_what_is_there_already_is_not_replaced(node: Node) -> None:
    node.target.parent.mkdir(parents=True)
    node.target.write_text("precious")
    with pytest.raises(CarmeError, match="cannot be put to"):
        build(node.recipe(), node.site)
    assert node.target.read_text() == "precious"
    assert [file.name for file in node.target.parent.iterdir()] == ["mine.sif"]


def test_pip_uses_the_nodes_index_but_not_its_folders(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://pip.example/simple\nextra-index-url =\n  file:///opt/x\n"
        "  https://more.example/\nfind-links = /opt/wheels\nuser = true\ntrusted-host = pip.example\n"
    )
    shown = building._pip_configuration(file)
    assert "index-url = https://pip.example/simple\n" in shown
    assert "extra-index-url = https://more.example/\n" in shown and "trusted-host = pip.example" in shown
    assert "/opt" not in shown and "user = true" not in shown


def test_the_program_leaves_a_result_and_honest_exit_codes(node: Node, tmp_path: Path) -> None:
    folder = tmp_path / "key"
    (folder / "files").mkdir(parents=True)
    (folder / "files" / building.RECIPE).write_text(node.recipe().model_dump_json())
    (tmp_path / "carme.toml").write_text(
        f'[site]\nname = "t"\nurl = "https://t.example"\n[slurm]\ncluster = "t"\n'
        f'[images]\ndirectory = "{node.site.directory}"\n'
    )
    environment = os.environ | {
        "CARME_JOB_FOLDER": str(folder),
        "CARME_CONFIG": str(tmp_path / "carme.toml"),
        "PYTHONPATH": str(Path(building.__file__).parents[2]),
    }

    def run() -> "subprocess.CompletedProcess[str]":
        program = [sys.executable, "-m", "carme.images.building"]
        return subprocess.run(program, env=environment, capture_output=True, text=True, check=False)

    done = run()
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "result").read_text())["packages"]["NumPy"] == "2.1"
    (folder / "result").unlink()
    again = run()
    assert again.returncode == 1 and "cannot be put to" in again.stderr
    assert not (folder / "result").exists()


@pytest.mark.parametrize(
    ("kind", "text"), [("definition", "%post\n"), ("requirements", " "), ("requirements", "a\0")]
)
def test_a_text_that_defines_no_image_is_refused(kind: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_text(kind, text)
    assert refused.value.field == "text"


def test_a_file_never_goes_by_the_name_of_a_sites_image() -> None:
    own = {"file": "/home/ada/mine.sif", "digest": DIGEST}
    request = {"name": "x", "kind": "batch", "command": ["true"], "minutes": 1}
    assert JobRequest.read(request | {"image": "mine@ada", "image_file": own}).image_file == ImageFile(**own)
    for change in (
        {"image": "torch", "image_file": own},
        {"image_file": own},
        {"image": "mine@ada", "image_file": own | {"file": "relative"}},
        {"image": "mine@ada", "image_file": own | {"file": "/a:/etc"}},
        {"image": "mine@ada", "image_file": own | {"digest": "md5:x"}},
        {"image": "mine@"},
        {"image": "mine@a/b"},
    ):
        with pytest.raises(InvalidRequest):
            JobRequest.read(request | change)
    with pytest.raises(InvalidRequest):
        SessionOptions.read({"image": "torch", "minutes": 1, "image_file": own})


def test_the_label_of_a_job_names_an_own_image() -> None:
    label = Label("batch", "mine@ada", "0" * 32)
    assert Label.read(str(label)) == label
