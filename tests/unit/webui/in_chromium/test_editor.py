"""The editor of a job's script, and the form that its #SBATCH lines fill in."""

import re

import pytest
from django.conf import settings
from playwright.sync_api import Page, expect
from real_chromium import sign_in as fill_in_login

from ..conftest import PASSWORD
from ..fake_broker import FakeBroker
from .conftest import sign_in
from .test_charts import check_appearance

pytestmark = pytest.mark.django_db(transaction=True)

SCRIPT = (
    "#!/bin/bash\n#SBATCH --job-name=train --gpus-per-node=a100:2\n"
    "#SBATCH --nodes=2 --time=90 --mail-type=END\n"
    'echo "step $1"  # once\n'
)


def test_sbatch_lines_fill_the_form_in(page: Page, sample_data: None, broker: FakeBroker) -> None:
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    sign_in(page)
    page.goto("/jobs/submit/")
    editor = page.get_by_label("Script", exact=True)
    editor.fill(SCRIPT)
    expect(page.locator("#from-script")).to_contain_text("GPUs per node 2")
    expect(page.locator("#from-script")).to_contain_text("Ignored: --mail-type.")
    wanted = {"name": "train", "nodes": "2", "gpus_per_node": "2", "hours": "1", "minutes": "30"}
    for name, value in wanted.items():
        expect(page.locator(f"#id_{name}")).to_have_value(value)
    time = page.get_by_role("group", name="Time")
    expect(time.get_by_label("Custom")).to_be_checked()
    # Lines for Slurm, strings and comments have colours of their own.
    expect(page.locator(".slurm")).to_have_count(2)
    expect(page.locator(".slurm-option")).to_have_text(
        ["--job-name", "--gpus-per-node", "--nodes", "--time", "--mail-type"]
    )
    colours = page.locator(".cm-line span").evaluate_all("all => all.map(e => getComputedStyle(e).color)")
    assert len(set(colours)) > 3
    # Later Chromium itself gives what replaces marked text an inline style, which the policy refuses.
    assert not complaints, "the policy forbids nothing that the editor does"
    # What the user sets stays; what the script no longer says is as the form begins.
    page.get_by_label("Nodes").fill("1")
    editor.fill("#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=1\ntrue\n")
    expect(page.locator("#id_gpus_per_node")).to_have_value("1")
    expect(page.locator("#id_name")).to_have_value("")
    expect(time.get_by_label("1 h")).to_be_checked()
    expect(page.get_by_label("Hours")).to_be_hidden()
    expect(page.locator("#id_nodes")).to_have_value("1")
    # A wrong line is marked while it is written.
    editor.fill("#!/bin/bash\n#SBATCH --nodes=many\ntrue\n")
    expect(page.locator("#from-script .error")).to_contain_text("Line 2 of the script")
    # By keyboard: the tab key leaves the editor.
    editor.focus()
    page.keyboard.press("Control+End")
    page.keyboard.type("date")
    page.keyboard.press("Tab")
    expect(editor).not_to_be_focused()
    editor.fill(SCRIPT.replace("--nodes=2", ""))
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_role("heading", name=re.compile("train"))).to_be_visible()
    (submitted,) = broker.requests_of("submit")
    assert (submitted.request.name, submitted.request.gpus_per_node, submitted.request.minutes) == (
        "train",
        2,
        90,
    )
    assert submitted.request.nodes == 1
    page.goto("/jobs/submit/")
    page.get_by_label("Script", exact=True).fill(SCRIPT)
    expect(page.locator("#from-script")).to_contain_text("GPUs per node 2")
    check_appearance(page, "job-form", [])


def test_a_script_outlives_a_login_that_expired_meanwhile(
    page: Page, sample_data: None, broker: FakeBroker
) -> None:
    page.route("**/predict/", lambda route: route.abort())
    editor, time = page.get_by_label("Script", exact=True), page.get_by_role("group", name="Time")
    sign_in(page)
    page.goto("/jobs/submit/")
    editor.fill(SCRIPT)
    expect(page.locator("#from-script")).to_contain_text("GPUs per node 2")
    # A part of the page finds out first; all that the page loads at its beginning has come.
    page.wait_for_load_state("networkidle")
    page.context.clear_cookies(name=settings.SESSION_COOKIE_NAME)
    editor.fill(f"{SCRIPT}# the end\n")
    fill_in_login(page, "alice", PASSWORD)
    expect(editor).to_contain_text("step $1")
    expect(page.locator("#from-script")).to_contain_text("GPUs per node 2")
    # So does the form that is sent. What the user set stays the user's own.
    page.locator("#id_nodes").fill("1")
    time.get_by_label("4 h", exact=True).check()
    page.context.clear_cookies(name=settings.SESSION_COOKIE_NAME)
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_text("Your login has expired")).to_be_visible()
    fill_in_login(page, "alice", PASSWORD)
    expect(editor).to_contain_text("step $1")
    expect(page.locator("#from-script")).to_contain_text("GPUs per node 2")
    expect(page.locator("#id_nodes")).to_have_value("1")
    # What the script filled in stays the script's.
    editor.fill(SCRIPT.replace("name=train", "name=again"))
    expect(page.locator("#id_name")).to_have_value("again")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_role("heading", name=re.compile("again"))).to_be_visible()
    (submitted,) = broker.requests_of("submit")
    sent = submitted.request
    assert (sent.name, sent.minutes, sent.nodes) == ("again", 240, 1)
    page.wait_for_load_state()  # the job's page drops the text when its scripts have run
    page.goto("/jobs/submit/")
    expect(editor).not_to_contain_text("step")


def test_signing_out_forgets_a_script(page: Page, sample_data: None) -> None:
    sign_in(page)
    page.goto("/jobs/submit/")
    page.get_by_label("Script", exact=True).fill(SCRIPT)
    expect(page.locator("#from-script")).to_contain_text("GPUs per node 2")
    saved = "sessionStorage.getItem('carme-draft')"
    assert "step" in page.evaluate(saved)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert page.evaluate(saved) is None


def test_what_the_form_shows_is_what_is_submitted(page: Page, sample_data: None, broker: FakeBroker) -> None:
    sign_in(page)
    script = "#!/bin/bash\n#SBATCH --nodes=1 --mem=4G\ntrue\n"
    # A form that begins otherwise: the pattern's two nodes stay, whatever the script asks for.
    page.goto("/jobs/submit/?pattern=distributed")
    page.get_by_label("Script", exact=True).fill(script)
    expect(page.locator("#from-script")).to_contain_text("Nodes 1")
    expect(page.locator("#id_nodes")).to_have_value("2")
    # So it is after the check, which leaves to the script what the script filled in.
    page.get_by_role("button", name="Check only").click()
    expect(page.get_by_text("You can submit this.")).to_be_visible()
    expect(page.locator("#from-script")).to_contain_text("Nodes 1")
    expect(page.locator("#id_nodes")).to_have_value("2")
    editor = page.get_by_label("Script", exact=True)
    editor.fill(script.replace("4G", "2G"))
    memory = page.locator("#id_memory_mb_per_node")
    expect(memory).to_have_value("2048")
    # An empty field is the script's again.
    page.get_by_text("More options").click()
    memory.fill("7")
    memory.fill("")
    memory.press("Tab")
    expect(memory).to_have_value("2048")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_role("heading", name=re.compile("distributed"))).to_be_visible()
    (submitted,) = broker.requests_of("submit")
    assert (submitted.request.nodes, submitted.request.memory_mb_per_node) == (2, 2048)


def test_a_time_is_chosen_by_a_click_or_by_the_script(
    page: Page, sample_data: None, broker: FakeBroker
) -> None:
    sign_in(page)
    page.goto("/jobs/submit/")
    editor, time = page.get_by_label("Script", exact=True), page.get_by_role("group", name="Time")
    editor.fill("#!/bin/bash\n#SBATCH --time=4:00:00\ntrue\n")
    expect(time.get_by_label("4 h", exact=True)).to_be_checked()
    # What the user chooses counts, also where the form begins with it.
    time.get_by_label("1 h").check()
    editor.fill("#!/bin/bash\n#SBATCH --time=5:00:00\ntrue\n")
    expect(page.locator("#from-script")).to_contain_text("300")
    expect(time.get_by_label("1 h")).to_be_checked()
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_role("heading", name=re.compile("job"))).to_be_visible()
    time.get_by_label("1 h").wait_for(state="detached")
    page.goto("/jobs/submit/")
    editor.fill("#!/bin/bash\n#SBATCH --time=5:00:00\ntrue\n")
    expect(time.get_by_label("Custom")).to_be_checked()
    page.get_by_role("button", name="Submit", exact=True).click()
    time.get_by_label("1 h").wait_for(state="detached")
    assert [request.request.minutes for request in broker.requests_of("submit")] == [60, 300]
