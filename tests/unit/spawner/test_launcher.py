"""What JupyterLab's launcher offers: apps, examples, and kernels by the names of their images."""

import contextlib
import json
import socket
from pathlib import Path

import pytest

from carme_spawner.singleuser import home, kernels
from carme_spawner.singleuser.programs import listens

from .example_notebooks import write_example, write_examples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an image's examples."""
    return write_examples(tmp_path / "image-examples")


def test_examples_are_what_notebooks_say_of_themselves(folder: Path, tmp_path: Path) -> None:
    shown = [{"name": "1-first", "title": "First <steps>", "description": "What this session has."}]
    assert home.examples(folder) == shown
    write_example(folder / "3-plain.ipynb", ["plain"])
    assert home.examples(folder)[1:] == [{"name": "3-plain", "title": "plain", "description": ""}]
    assert home.examples(tmp_path / "nothing") == []
    (folder / "0-gone.ipynb").symlink_to("nowhere")
    assert home.examples(folder)[0]["name"] == "1-first"


def test_examples_have_words_in_a_readers_language(folder: Path) -> None:
    path = folder / "1-first.ipynb"
    whole = json.loads(path.read_text())
    whole["metadata"]["carme"] = {"de": {"title": "Erste <Schritte>", "description": "Was sie hat."}}
    path.write_text(json.dumps(whole))
    german = {"name": "1-first", "title": "Erste <Schritte>", "description": "Was sie hat."}
    assert home.examples(folder, "de_DE") == [german]
    for locale in ("", "en", "fr_FR"):
        assert home.examples(folder, locale)[0]["title"] == "First <steps>"
    for wrong in ([], {"de": 7}, {"de": {"title": ""}}):
        whole["metadata"]["carme"] = wrong
        path.write_text(json.dumps(whole))
        assert home.examples(folder, "de")[0]["title"] == "First <steps>"


def test_each_example_of_the_images_has_german_words() -> None:
    images = Path(__file__).resolve().parents[3] / "containers/images/examples"
    english, german = home.examples(images), home.examples(images, "de")
    assert len(english) == len([*images.glob("*.ipynb")]) > 0
    for text, translation in zip(english, german, strict=True):
        # A title may be the same word: checkpoints are Checkpoints.
        assert text["description"] != translation["description"], text["name"]
    assert (
        len(
            [
                text
                for text, translation in zip(english, german, strict=True)
                if text["title"] == translation["title"]
            ]
        )
        < 3
    )


def test_an_app_that_accepts_nothing_hangs_nobody(tmp_path: Path) -> None:
    path = tmp_path / "app.sock"
    assert not listens(path)
    with socket.socket(socket.AF_UNIX) as app, contextlib.ExitStack() as waiting:
        app.bind(str(path))
        assert not listens(path)
        app.listen(0)
        for _attempt in range(3):
            waiting_socket = waiting.enter_context(socket.socket(socket.AF_UNIX))
            waiting_socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting_socket.connect(str(path))
        assert listens(path)
    assert not listens(path)


def test_an_edited_copy_of_an_example_stays(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "home"
    place.mkdir()
    assert home.copy_example("1-first", place, folder) == "examples/1-first.ipynb"
    (place / "examples/1-first.ipynb").write_text("mine")
    home.copy_example("1-first", place, folder)
    assert [file.name for file in (place / "examples").iterdir()] == ["1-first.ipynb"]
    assert (place / "examples/1-first.ipynb").read_text() == "mine"
    for name in ("../secret", "none", "", "digits.py"):
        with pytest.raises(FileNotFoundError):
            home.copy_example(name, place, folder)


def test_a_kernel_is_named_by_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = tmp_path / "labels.json"
    name = kernels.image_name.__wrapped__
    assert name(labels) == ""
    for text in ("{", "[]", "{}", '{"carme.title": 7}', '"carme.title"'):
        labels.write_text(text)
        assert name(labels) == ""
    labels.write_text('{"carme.title": " PyTorch "}')
    monkeypatch.setattr(kernels, "version", {"torch": "2.13.0+cpu"}.__getitem__)
    assert name(labels) == "PyTorch 2.13"

    monkeypatch.setattr(kernels, "image_name", lambda: "PyTorch 2.13")
    assert kernels.ImageKernels().get_kernel_spec("python3").display_name == "Python 3 · PyTorch 2.13 image"
    # One that the user has put into the home is the user's.
    monkeypatch.setenv("HOME", str(tmp_path))
    own = tmp_path / ".local/share/jupyter/kernels"
    (own / "python3").mkdir(parents=True)
    (own / "python3/kernel.json").write_text('{"argv": ["x"], "display_name": "Mine", "language": "python"}')
    found = kernels.ImageKernels(kernel_dirs=[str(own)]).get_all_specs()
    assert found["python3"]["spec"]["display_name"] == "Mine"
