"""The magics of notebooks in JupyterLab's page: what a report looks like, and options that Tab completes."""

import json
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from patience import HANG

from .front import BASE, Front

pytestmark = pytest.mark.asyncio(loop_scope="package")

REPORT = "application/vnd.carme.report+json"
USE = """<section id="use" class="use" aria-labelledby="use-heading"%s>
<h2 id="use-heading">Resource usage</h2><p>GPUs %s %% used</p><h3>Advice</h3>
<ul><li>Ask for fewer GPUs.</li></ul></section>"""
RUNTIME = Path(__file__).resolve().parents[4] / "containers/runtime/src"


def notebook(home: Path, *cells: dict[str, object]) -> None:
    """Write notebook `a.ipynb` into the home."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    whole = {"cells": list(cells), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (home / "a.ipynb").write_text(json.dumps(whole))


def code(name: str, source: str, *outputs: dict[str, object]) -> dict[str, object]:
    cell: dict[str, object] = {"cell_type": "code", "id": name, "metadata": {}, "execution_count": None}
    return cell | {"source": source, "outputs": list(outputs)}


def report(job: object) -> dict[str, object]:
    data = {REPORT: {"job": job}, "text/plain": "In a terminal: carme report"}
    return {"output_type": "display_data", "metadata": {}, "data": data}


async def test_a_report_is_drawn_as_on_the_portal(front: Front, fresh_page: Page) -> None:
    complaints: list[str] = []
    fresh_page.on("pageerror", lambda error: complaints.append(str(error)))
    front.pages["/jobs/123/use/"] = USE % (' hx-get="/jobs/123/use/"', 12)
    front.pages["/jobs/7/use/"] = USE % ("", 7)
    wrong = [report("../../logout"), report(-1), report(None)]
    front.missing = {"/jobs/9/use/"}
    cells = [code("a", "", report(123)), code("b", "", report(7)), code("c", "", *wrong)]
    notebook(front.home, *cells, code("d", "", report(8)), code("e", "", report(9)))
    await fresh_page.clock.install()
    # JupyterLab draws only cells that are in view, and outputs that come first move the others out of it.
    settings = front.home / ".jupyter/lab/user-settings/@jupyterlab/notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text(json.dumps({"windowingMode": "none"}))
    await fresh_page.goto(f"{front.url}{BASE}lab/tree/a.ipynb?reset")
    shown = fresh_page.locator(".carme-report")
    await expect(shown.first).to_contain_text("GPUs 12 % used")
    await expect(shown.first).to_contain_text("Ask for fewer GPUs.")
    await expect(shown.nth(1)).to_contain_text("GPUs 7 % used")
    for number in (2, 3, 4):
        await expect(shown.nth(number)).to_have_text("This output names no job.")
    await expect(shown.nth(5)).to_have_text("The portal does not answer just now.")
    await expect(shown.nth(6)).to_have_text("There is no job 9 of yours.")
    assert await fresh_page.locator(".carme-report [id]").count() == 0, "two of them are on one page"
    assert await shown.first.locator("section").get_attribute("aria-label") == "Report of job 123"
    # That of a job that runs is brought up to date, as is what could not be had; the others stay.
    front.pages["/jobs/123/use/"] = USE % ("", 90)
    front.pages["/jobs/8/use/"] = USE % (' hx-get="/jobs/8/use/"', 8)
    await fresh_page.clock.run_for(20_000)
    await expect(shown.first).to_contain_text("GPUs 90 % used")
    await expect(shown.nth(5)).to_contain_text("GPUs 8 % used")
    before = front.questions["/jobs/7/use/"], front.questions["/jobs/123/use/"]
    assert before[0] == 1
    front.pages["/jobs/8/use/"] = USE % (' hx-get="/jobs/8/use/"', 88)
    await fresh_page.clock.run_for(20_000)
    await expect(shown.nth(5)).to_contain_text("GPUs 88 % used")
    assert before == (front.questions["/jobs/7/use/"], front.questions["/jobs/123/use/"])
    assert not complaints


async def test_options_of_the_magics_are_completed(front: Front, page: Page) -> None:
    # JupyterLab drops answers that take longer than this, by default a second: the machine may be busy.
    settings = front.home / ".jupyter/lab/user-settings/@jupyterlab/completer-extension"
    settings.mkdir(parents=True)
    (settings / "manager.jupyterlab-settings").write_text(json.dumps({"providerTimeout": HANG * 1000}))
    load = f"import sys\nsys.path.insert(0, {str(RUNTIME)!r})\n"
    load += "%load_ext carme_runtime.notebook\nprint('ready')"
    notebook(front.home, code("a", load), code("b", ""))
    await page.goto(f"{front.url}{BASE}lab/tree/a.ipynb?reset")
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    await cells.first.locator(".cm-content").click()
    await page.keyboard.press("Shift+Enter")
    await expect(cells.first.locator(".jp-OutputArea-output")).to_have_text("ready")
    await cells.nth(1).locator(".cm-content").click()
    await page.keyboard.type("%%carme_run --dev")
    await page.keyboard.press("Tab")
    offered = page.locator(".jp-Completer-item")
    await expect(offered.filter(has_text="--devices-per-rank")).to_be_visible()
    await offered.filter(has_text="--devices-per-node").click()
    await expect(cells.nth(1).locator(".cm-line").first).to_have_text("%%carme_run --devices-per-node")
