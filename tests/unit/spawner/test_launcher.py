"""JupyterLab's launcher as the session's home: apps, examples, portal and help, on a real server."""

import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Page, Route, expect

from carme_spawner.singleuser import home, kernels
from carme_spawner.singleuser.programs import listens

from .conftest import Site, eventually
from .test_lab_page import BASE, Front, chromium, front, page

__all__ = ["chromium", "front", "page"]

in_chromium = pytest.mark.asyncio(loop_scope="module")
JOB = str(5_000_000 + os.getpid())
APPS = Path(f"/tmp/carme-{JOB}/apps")
TEXT = "# First <steps>\n\nWhat this\nsession has.\n\nMore."


def notebook(path: Path, source: list[str] | str = TEXT) -> None:
    cell = {"cell_type": "markdown", "id": "a", "metadata": {}, "source": source}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    code = {"cell_type": "code", "id": "b", "metadata": {}, "source": "print('has run')", "outputs": []}
    cells = [cell, code | {"execution_count": None}]
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(whole))


def examples(folder: Path) -> Path:
    """The image's examples: one notebook, and what is none."""
    folder.mkdir()
    notebook(folder / "1-first.ipynb")
    (folder / "2-broken.ipynb").write_text("{")
    (folder / "digits.py").write_text("")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an image's examples."""
    return examples(tmp_path / "image-examples")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(lasting_site: Site, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A site in which ada's session s1 is ready, with an image that has TensorBoard."""
    image = tmp_path_factory.mktemp("image")
    programs = image / "programs"
    programs.mkdir()
    for name in ("tensorboard", "no-program"):
        (programs / name).write_text("#!/bin/sh\n")
    (programs / "tensorboard").chmod(0o755)
    labels = image / "labels.json"
    labels.write_text(json.dumps({"carme.title": "Deep <Learning>"}))
    code = (
        "from pathlib import Path\nfrom carme_spawner import singleuser\n"
        "from carme_spawner.singleuser import home, kernels\n"
        f"home.PROGRAMS = Path({str(programs)!r})\n"
        f"kernels.image_name.__wrapped__.__defaults__ = (Path({str(labels)!r}),)\nsingleuser.main()"
    )
    names = [f"SLURM_JOB_ID={JOB}", f"CARME_EXAMPLES={examples(image / 'examples')}"]
    lasting_site.broker.command = ["env", *names, sys.executable, "-s", "-c", code, "--allow-root"]
    await lasting_site.start()
    await eventually(lasting_site.is_ready, "JupyterLab is ready")
    yield lasting_site
    await lasting_site.broker.end_all()
    shutil.rmtree(APPS.parent, ignore_errors=True)


def test_examples_are_what_notebooks_say_of_themselves(folder: Path, tmp_path: Path) -> None:
    shown = [{"name": "1-first", "title": "First <steps>", "description": "What this session has."}]
    assert home.examples(folder) == shown
    notebook(folder / "3-plain.ipynb", ["plain"])
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


def test_a_copy_of_ones_own_stays(folder: Path, tmp_path: Path) -> None:
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


@in_chromium
async def test_the_launcher_is_the_sessions_home(front: Front, page: Page) -> None:
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.goto(f"{front.url}{BASE}lab?reset")
    tile = page.locator('.jp-LauncherCard[data-category="Session"]')
    await expect(tile.filter(has_text="Examples")).to_be_visible()
    await expect(tile).to_have_text(["TensorBoard", "Terminal", "Examples", "Portal", "Help"])
    # They are in sight: only the notebooks come before them.
    sections = page.locator(".jp-Launcher-sectionTitle")
    await expect(sections).to_have_text(["Notebook", "Session", "Examples", "Console", "Other"])
    # The kernel is called as the image, and the home has no kernel of it.
    kernel = page.locator('.jp-LauncherCard[data-category="Notebook"]')
    await expect(kernel.first).to_contain_text("Python 3 · Deep <Learning> image")
    assert not list(front.home.rglob("kernel.json"))

    # The page of this session, and the guides, in tabs of their own.
    app = ("TensorBoard", f"{BASE}tensorboard/")
    for name, path in (app, ("Portal", "/sessions/s1/"), ("Help", "/help/")):
        async with page.context.expect_page() as opened:
            await tile.filter(has_text=name).click()
        other = await opened.value
        await eventually(lambda path=path: front.questions[path], f"{name} leads to {path}")
        await other.close()

    # A web app of the user's own is there as soon as somebody returns to the page, and gone with it.
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(APPS / "mine.sock"))
        listening.listen()
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await expect(tile.filter(has_text="mine")).to_be_visible()
    await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    await expect(tile.filter(has_text="mine")).to_have_count(0)

    # An example opens as a copy of one's own, from its tile or from the gallery, and runs with one click.
    example = page.locator('.jp-LauncherCard[data-category="Examples"]')
    await expect(example).to_have_text(["First <steps>"])
    await example.click()
    await expect(page.locator(".jp-Notebook .jp-RenderedMarkdown h1").first).to_contain_text("First")
    await page.get_by_role("button", name="Run All", exact=True).click()
    await expect(page.locator(".jp-Notebook .jp-CodeCell .jp-OutputArea-output")).to_have_text("has run")
    await page.get_by_role("tab", name="Launcher").click()
    await tile.filter(has_text="Examples").click()
    tab = page.locator(".lm-TabBar-tab").filter(has_text="Examples")
    await expect(tab.locator(".lm-TabBar-tabIcon svg")).to_be_visible()
    await page.get_by_role("button", name="First <steps> What this session has.").click()
    await expect(page.locator(".jp-Notebook .jp-RenderedMarkdown h1").first).to_contain_text("First")
    assert (front.home / "examples/1-first.ipynb").is_file()

    # The way out is the portal's, and the hub's page is the portal.
    await page.get_by_role("menuitem", name="File", exact=True).click()
    menu = page.locator(".lm-Menu").first
    await expect(menu.get_by_role("menuitem", name="Hub Control Panel")).to_be_visible()
    assert await menu.get_by_role("menuitem", name="Log Out").count() == 0
    async with page.context.expect_page() as opened:
        await menu.get_by_role("menuitem", name="Hub Control Panel").click()
    await opened.value
    await eventually(lambda: front.questions["/"], "it leads to the portal")
    assert not complaints


@in_chromium
async def test_a_theme_that_is_lost_on_its_way_is_loaded_again(front: Front, page: Page) -> None:
    lost: list[str] = []

    async def lose_two(route: Route) -> None:
        lost.append(route.request.url)
        await (route.abort() if len(lost) <= 2 else route.continue_())

    await page.route("**/lab/api/themes/**", lose_two)
    await page.goto(f"{front.url}{BASE}lab?reset")
    await expect(page.locator("body[data-jp-theme-name]")).to_be_attached()
    assert len(lost) == 3
    assert await page.locator(".jp-Dialog").count() == 0
