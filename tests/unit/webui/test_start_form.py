"""The start form before Start is pressed: when it would begin, presets, and addresses that fill it in."""

import html as html_module
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from django.utils import timezone

from carme.config.settings import HardwareSettings
from carme.errors import SlurmError
from carme.images import Image
from carme.jobs import Access, Association, Forecast, GpuForecast, JobRequest, Node, Partition
from carme.jobs.limits import Limits
from carme.translation import message
from carme_webui import start_times
from carme_webui.accounts.models import User
from carme_webui.cluster import Supply
from carme_webui.images.cards import card as card_of
from carme_webui.projects.models import Membership, Project
from carme_webui.sessions import choices, supply_plan
from carme_webui.sessions.models import Preset, Session
from patience import HANG

from .conftest import Browser
from .fake_broker import FakeBroker, make_job

FORM: dict[str, Any] = {
    "image": "torch", "partition": "gpu", "gpu_type": "a100", "gpus_per_node": 4, "nodes": 2, "minutes": 120,
}  # fmt: skip


@pytest.fixture
def project(alice: User) -> Project:
    """A project of Alice's."""
    found = Project.objects.create(name="speech", title="Speech")
    Membership.objects.create(project=found, user=alice)
    return found


def estimate(browser: Browser, part: str = "above the buttons", **values: Any) -> str:
    """What the form says of its choice above its buttons, or in the bar that phones have."""
    answer = browser.send("/", "/sessions/estimate/", **(FORM | values))
    assert answer.status_code == 200
    page = BeautifulSoup(answer.content, "html.parser")
    (bar,) = (found.extract() for found in page.select("#chosen[hx-swap-oob=true]"))
    shown = bar if part == "bar" else page
    return " ".join(shown.get_text(" ").split()).replace(" .", ".")


def test_partitions_that_take_none_of_my_jobs_are_not_offered(
    browser: Browser, broker: FakeBroker, settings: Any
) -> None:
    slurm = settings.SITE.slurm.model_copy(update={"default_account": "carme"})
    settings.SITE = settings.SITE.model_copy(update={"slurm": slurm})
    nodes = [Node(name=name, cpus=8, memory_mb=16_000, gpus={name: 2}) for name in ("a100", "h100", "l40")]
    broker.cluster = broker.cluster.model_copy(
        update={
            "nodes": nodes,
            "partitions": [
                Partition(name="gpu", default=True, node_names=["a100"]),
                Partition(name="long", node_names=["a100"]),
                Partition(name="staff", groups=["staff"], node_names=["h100"]),
                Partition(name="speech", accounts=["carme-speech"], node_names=["l40"]),
                Partition(name="secret", hidden=True, node_names=["l40"]),
                Partition(name="ours", hidden=True, groups=["staff"], node_names=["a100"]),
            ],
        }
    )
    broker.accesses["alice"] = Access(user="alice", groups=["users"])
    for page in ("/", "/jobs/submit/"):
        html = browser.get(page).content.decode()
        assert (
            'value="a100"' in html
            and 'value="ours"' not in html
            and 'value="long"' in html
            and 'value="staff"' not in html
            and 'value="speech"' not in html
            and 'value="secret"' not in html
        )
        assert 'value="h100"' not in html and 'value="l40"' not in html
    answer = browser.send("/", "/sessions/start/", name="s0123abcd", **(FORM | {"partition": "staff"}))
    assert answer.status_code == 422 and "There is no partition" in answer.content.decode()
    broker.accesses["alice"] = Access(user="alice", groups=["staff", "users"])
    html = browser.get("/").content.decode()
    assert 'value="staff"' in html and 'value="h100"' in html and 'value="speech"' not in html
    assert 'value="ours"' in html and 'value="secret"' not in html


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a request is remembered for as long as a test may take."""
    monkeypatch.setattr(start_times, "REMEMBERED", HANG)


@pytest.mark.usefixtures("remembered")
def test_a_refusal_below_the_form_is_in_each_readers_language_with_a_link(
    browser: Browser, broker: FakeBroker, alice: User
) -> None:
    broker.refusal = SlurmError(
        message("The job asks for more time than its partition allows."), message("Choose a shorter time.")
    )
    shown = []
    for language in ("", "de"):
        User.objects.filter(pk=alice.pk).update(language=language)
        answer = browser.send("/", "/sessions/estimate/", **FORM)
        shown.append(BeautifulSoup(answer.content, "html.parser"))
    english, german = ("".join(page.get_text()) for page in shown)
    assert "more time than its partition allows. " in english
    assert "more time than" not in german and "Partition" in german
    for page in shown:
        assert page.select_one("p a")["href"] == "/help/sessions/#time"  # pyright: ignore
    assert len(broker.requests_of("test")) == 1, "the second answer is what was stored"


def test_the_accounts_and_qualities_that_slurm_knows_are_offered_and_sent(
    browser: Browser, broker: FakeBroker, project: Project
) -> None:
    """Beside the projects; what AllowAccounts, AllowQos and limits exclude is refused with the reason."""
    broker.cluster = broker.cluster.model_copy(
        update={
            "partitions": [
                Partition(name="gpu", default=True, node_names=["n1", "n2"], qos=["long", "normal"]),
                Partition(name="vision", accounts=["vision"], node_names=["n1"]),
                Partition(name="root", accounts=["root"], node_names=["n1"]),
            ]
        }
    )
    broker.accesses["alice"] = Access(
        user="alice",
        enforced=["associations", "limits", "qos"],
        limits=[Limits(qos="long", minutes=90)],
        associations=[
            Association(account="physics", qos=["normal", "long", "low"], default=True),
            Association(account="vision", qos=["normal"]),
            Association(account=project.account, qos=["normal"]),
        ],
    )
    for page in ("/", "/jobs/submit/"):
        html = browser.get(page).content.decode()
        assert 'value="vision">vision' in html and f'value="{project.account}">{project.title}' in html
        assert 'value="physics"' not in html  # what pays anyway
        assert 'value="long"' in html and 'value="low"' in html and 'value="root"' not in html

    def refused(**values: Any) -> str:
        answer = browser.send("/", "/sessions/start/", name="s0123abcd", **(FORM | values))
        assert answer.status_code == 422
        return html_module.unescape(answer.content.decode())

    assert "does not take jobs of the account 'physics'" in refused(partition="vision", nodes=1)
    message = refused(qos="low")
    assert "quality of service 'low'" in message and "Choose one of these qualities of service: " in message
    assert "allows quality of service long at most 1 hour 30 minutes for one job" in refused(qos="long")
    assert not Session.objects.exists()
    wanted = FORM | {"qos": "long", "account": "physics", "minutes": 60}
    assert browser.send("/", "/sessions/start/", name="s0123abcd", **wanted).status_code == 302
    options = Session.objects.get().requested_options
    assert (options.account, options.qos) == ("physics", "long")


def test_what_begins_at_once_needs_no_other_advice(browser: Browser, broker: FakeBroker) -> None:
    assert estimate(browser) == "Starts now. Cost in GPU-hours: 16."
    requested = [request.request for request in broker.requests_of("test")]
    assert [(request.nodes, request.gpus_per_node, request.minutes) for request in requested] == [(2, 4, 120)]
    assert not Session.objects.exists()


@pytest.mark.usefixtures("remembered")
def test_less_is_offered_where_it_begins_earlier(browser: Browser, broker: FakeBroker) -> None:
    now = timezone.now().replace(microsecond=0)

    def starts(request: JobRequest) -> datetime:
        if request.nodes == 1:
            return now
        return now + timedelta(hours=1 if request.minutes < 100 else 5)

    broker.starts = starts
    text = estimate(browser)
    after = timezone.now()
    assert text.startswith("Expected start: between ")  # by what jobs lately used of their time
    early, late = re.findall(r"\d\d? [A-Z][a-z]{2}, \d\d:\d\d UTC", text)[:2]
    # Half of what is left when the broker counts, which is between these two moments.
    late_at = now + timedelta(hours=5)
    assert early in {f"{moment + (late_at - moment) / 2:%-d %b, %H:%M} UTC" for moment in (now, after)}
    assert late == f"{late_at:%-d %b, %H:%M} UTC"
    assert "With 1 node it would start now. With 1 hour it would start about " in text
    assert " GPUs" not in text  # fewer of them would not begin earlier
    page = browser.send("/", "/sessions/estimate/", **FORM).content.decode()
    links = re.findall(r'href="([^"]+#start-heading)"', page)
    filled = browser.get(links[0].replace("&amp;", "&")).content.decode()
    assert 'name="nodes" value="1"' in filled
    assert 'name="hours" value="2"' in filled and 'name="minutes" value="0"' in filled
    assert len(broker.requests_of("test")) == 4  # the second time from memory


def job_estimate(browser: Browser, **values: Any) -> BeautifulSoup:
    """What the form of a batch job shows above Submit."""
    form = {"script": "", "nodes": 1, "gpus_per_node": 0, "minutes": 120} | values
    answer = browser.send("/jobs/submit/", "/jobs/submit/predict/", **form)
    assert answer.status_code == 200
    return BeautifulSoup(answer.content, "html.parser")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "Starts now. Costs no GPU-hours."),
        ({"gpus_per_node": 2, "nodes": 2}, "Starts now. Cost in GPU-hours: 8."),
        (
            {"script": "#!/bin/sh\n#SBATCH --gpus-per-node=2 --array=0-9\n"},
            "Starts now. Cost in GPU-hours: 40.",
        ),
        ({"script": "#!/bin/sh\n#SBATCH --nodes=many\n"}, ""),  # the page says so beside the fields
        ({"nodes": ""}, ""),
    ],
)
def test_a_batch_job_shows_its_start_and_cost_before_it_is_submitted(
    browser: Browser, broker: FakeBroker, values: dict[str, Any], expected: str
) -> None:
    shown = " ".join(job_estimate(browser, **values).get_text(" ").split()).replace(" .", ".")
    assert shown == expected
    assert not broker.requests_of("submit")
    assert {request.request.array for request in broker.requests_of("test")} <= {None}


def test_a_batch_job_that_waits_shows_what_would_begin_earlier(browser: Browser, broker: FakeBroker) -> None:
    broker.starts = lambda request: timezone.now() + timedelta(hours=0 if request.nodes == 1 else 5)
    shown = job_estimate(browser, nodes=2, gpus_per_node=1)
    assert "With 1 node it would start now." in " ".join(shown.get_text(" ").split())
    assert not shown("a"), "the start form is of sessions"


def test_what_a_link_fills_in_starts_as_it_is(
    browser: Browser, alice: User, broker: FakeBroker, settings: Any, tmp_path: Path
) -> None:
    staging = settings.SITE.staging.model_copy(update={"scratch": tmp_path})
    settings.SITE = settings.SITE.model_copy(update={"staging": staging})
    preferred = {"stage": "/data/a, scratch:/data/b", "results": "/home/alice/results", "cpus_per_node": 8}
    broker.starts = lambda request: timezone.now() + timedelta(hours=request.nodes)
    page = browser.send("/", "/sessions/estimate/", **(FORM | preferred)).content.decode()
    save(browser, title="Mine", **preferred)
    for address in (
        re.findall(r'href="([^"]+#start-heading)"', page)[0].replace("&amp;", "&"),
        f"/?{Preset.of(alice)[0].query}",
    ):
        form = browser.get(address).context["form"]
        filled = {field.name: field.value() for field in form.visible_fields()}
        filled = {name: "" if value is None else value for name, value in filled.items()}
        started = browser.send("/", "/sessions/start/", **filled)
        assert started.status_code == 302, started.context["form"].errors
        options = Session.objects.latest("created").requested_options
        assert [(data.source, data.target) for data in options.stage] == [
            ("/data/a", "local"),
            ("/data/b", "scratch"),
        ]
        assert (options.results, options.cpus_per_node) == ("/home/alice/results", 8)


def test_a_card_and_a_time_stand_for_numbers(browser: Browser, broker: FakeBroker, settings: Any) -> None:
    form = browser.get("/").context["form"]
    assert [str(label) for _, label in form.fields["hardware"].choices] == [
        "No GPU, 1 CPU, 2\xa0GiB", "1 GPU, 4 CPUs, 15.6\xa0GiB", "4 GPUs, 16 CPUs, 62.5\xa0GiB",
        "2 nodes, 4 GPUs each, 16 CPUs, 62.5\xa0GiB", "Custom",
    ]  # fmt: skip
    assert (form["hardware"].value(), form["time"].value()) == ("1-1--", "60")
    values = FORM | {"hardware": "1-1--", "time": "240", "gpu_type": ""}
    assert browser.send("/", "/sessions/start/", **values).status_code == 302
    options = Session.objects.get().requested_options
    assert (options.gpus_per_node, options.nodes, options.minutes) == (1, 1, 240)
    # Numbers of one's own, and what no card says.
    form = browser.get("/?gpus_per_node=3&minutes=50").context["form"]
    assert (form["hardware"].value(), form["time"].value()) == ("custom", "custom")
    refused = browser.send("/", "/sessions/start/", **(values | {"hardware": "none"}))
    assert refused.status_code == 422 and "none is not one of" in refused.content.decode()


@pytest.mark.parametrize(
    ("hours", "minutes", "total"),
    [("2", "30", 150), ("", "90", 90), ("3", "", 180), ("0", "45", 45), ("", "", None), ("0", "0", None)],
)
def test_a_time_of_ones_own_has_hours_and_minutes(
    browser: Browser, broker: FakeBroker, hours: str, minutes: str, total: int | None
) -> None:
    values = FORM | {"time": "custom", "hours": hours, "minutes": minutes}
    answer = browser.send("/", "/sessions/start/", **values)
    if total is None:
        assert answer.status_code == 422 and "at least one minute" in answer.content.decode()
        return
    assert answer.status_code == 302, answer.context["form"].errors
    session = Session.objects.get()
    assert session.requested_options.minutes == total
    form = browser.get(f"/?again={session.name}").context["form"]
    assert (form["hours"].value(), form["minutes"].value()) == divmod(total, 60)


def test_a_card_says_what_is_in_the_image_and_when_it_was_built(
    browser: Browser, broker: FakeBroker, settings: Any, tmp_path: Path
) -> None:
    packages = {"torch": "2.13", "numpy": "2.1", "aiohttp": "3.9", "keras": "3.15", "zarr": "2", "attrs": "1"}
    built = (timezone.now() - timedelta(days=3)).isoformat()
    manifest = {
        "name": "big",
        "title": "Big",
        "description": "All <in>",
        "packages": packages,
        "built": built,
    }
    (tmp_path / "big.sif").write_text("")
    (tmp_path / "big.json").write_text(json.dumps(manifest))
    images = settings.SITE.images.model_copy(update={"directory": tmp_path})
    settings.SITE = settings.SITE.model_copy(update={"images": images})
    (tmp_path / "broken.sif").write_text("")
    (tmp_path / "broken.json").write_text("{")
    page = BeautifulSoup(browser.get("/?image=big").content, "html.parser")
    cards = page.select(".images .option")
    assert [card.select("input")[0]["value"] for card in cards] == ["big", "broken"], (
        "the chosen one is first"
    )
    card, broken = cards
    assert card.select_one("input[checked]") and "Built 3\xa0days ago" in card.text
    assert card.select(".what")[0]["title"] == "All <in>"
    shown = [element.text for element in card.select(".package")]
    assert shown == ["torch 2.13", "keras 3.15", "numpy 2.1"]
    (more,) = card.select("a")
    assert more.text == "3 more Big" and browser.get(str(more["href"])).status_code == 200
    # If there are well-known packages, the first ones of the alphabet are not shown.
    few = {"file": tmp_path / "big.sif", "packages": {"aiohttp": "3.9", "jupyterlab": "4.6"}}
    known = card_of(Image.model_validate(manifest | few))
    assert (known.inside, known.further) == ((("jupyterlab", "4.6"),), 1)
    # What cannot be read can be seen, and not be started.
    assert not broken.select_one("input[checked]") and "broken" in broken.text
    refused = browser.send("/", "/sessions/start/", **(FORM | {"image": "broken"}))
    assert refused.status_code == 422 and "cannot be read" in refused.content.decode()


def test_hardware_of_presets_is_a_choice(browser: Browser, alice: User, broker: FakeBroker) -> None:
    def save(name: str, **numbers: Any) -> None:
        options = {"image": "torch", "minutes": 60, "nodes": 1, **numbers}
        Preset.objects.create(owner=alice, name=name, options=options)

    save("As a card", gpus_per_node=1)
    save("Three", gpus_per_node=3, gpu_type="a100")
    save("Three as well", gpus_per_node=3, gpu_type="a100", minutes=20)
    page = BeautifulSoup(browser.get("/").content, "html.parser")
    titles = [element.get_text(" ") for element in page.select(".choices:not(.images) .option")]
    assert [title for title in titles if "Three" in title or "As a card" in title] == [
        "  Three 3 GPUs (a100), 12 CPUs, 46.9\xa0GiB"
    ]
    key = page.select("input[name=hardware][value^=preset-]")[0]["value"]
    chosen = FORM | {"hardware": key, "time": "60", "gpus_per_node": "", "nodes": "", "gpu_type": ""}
    assert "Cost in GPU-hours: 3." in estimate(browser, **chosen)
    browser.send("/", "/sessions/start/", **chosen)
    created = Session.objects.get().requested_options
    assert (created.gpus_per_node, created.nodes, created.gpu_type, created.minutes) == (3, 1, "a100", 60)


def test_a_number_that_is_refused_is_seen(browser: Browser, broker: FakeBroker, settings: Any) -> None:
    nodes = [node.model_copy(update={"gpus": {"a100": 1}}) for node in broker.cluster.nodes[:2]]
    card = HardwareSettings(title="A big one", gpus_per_node=2, gpu_type="a100", partition="gpu")
    sessions = settings.SITE.sessions.model_copy(update={"hardware": [card]})
    settings.SITE = settings.SITE.model_copy(update={"sessions": sessions})
    broker.cluster = broker.cluster.model_copy(update={"nodes": nodes})
    page = browser.get("/").content.decode()
    assert "A big one<small>2 GPUs (a100)</small>" in page
    refused = browser.send("/", "/sessions/start/", **(FORM | {"hardware": "2-1-a100-gpu", "time": "60"}))
    form = refused.context["form"]
    assert refused.status_code == 422 and "gpus_per_node" in form.errors
    assert (form["hardware"].value(), form["time"].value()) == ("custom", "60")


@pytest.mark.parametrize(("clock", "minutes"), [("08:30", 570), ("17:50", None), ("19:00", None)])
def test_a_session_can_last_until_the_evening(clock: str, minutes: int | None) -> None:
    hour, minute = map(int, clock.split(":"))
    now = datetime(2026, 11, 25, hour, minute, tzinfo=UTC)
    offered = dict(choices.times(60, 600, now))
    assert offered.get(choices.EVENING) == ("until 18:00" if minutes else None)
    assert minutes is None or choices.evening_minutes(now) == minutes


def test_what_few_need_is_behind_a_switch(browser: Browser, alice: User, broker: FakeBroker) -> None:
    page = browser.get("/").content.decode()
    assert '<details class="more">' in page and 'placeholder="Automatic"' in page
    refused = browser.send("/", "/sessions/start/", **(FORM | {"cpus_per_node": 99}))
    assert refused.status_code == 422
    page = refused.content.decode()
    assert "at most 16 processors; 99 were requested. Ask for 1 to 16." in page
    assert '<details class="more" open>' in page  # what is wrong is seen
    started = browser.send(
        "/", "/sessions/start/", **(FORM | {"cpus_per_node": 2, "memory_mb_per_node": 5000})
    )
    assert started.status_code == 302
    options = Session.objects.get().requested_options
    assert (options.cpus_per_node, options.memory_mb_per_node) == (2, 5000)
    again = browser.get(f"/?again={Session.objects.get().name}").content.decode()
    assert '<details class="more" open>' in again and 'name="cpus_per_node" value="2"' in again


def test_the_answer_is_nobody_elses(browser: Browser, bobs_browser: Browser, broker: FakeBroker) -> None:
    estimate(browser)
    estimate(bobs_browser)
    assert [request.user for request in broker.requests_of("test")] == ["alice", "bob"]


def test_a_refusal_of_slurm_is_reported(browser: Browser, broker: FakeBroker) -> None:
    broker.refusal = SlurmError("Your account may use 2 GPUs at most.", "Ask for fewer.")
    assert estimate(browser) == "Your account may use 2 GPUs at most. Ask for fewer."


def test_the_bar_of_phones_has_the_choice_and_its_start(browser: Browser, broker: FakeBroker) -> None:
    chosen = "Change: torch · 2 nodes · 4 GPUs each (a100) · 2 hours"
    assert estimate(browser, "bar") == f"{chosen} Starts now."
    assert estimate(browser, "bar", nodes=99) == "Choose image, hardware and time"
    broker.refusal = SlurmError("Your account may use 2 GPUs at most.", "Ask for fewer.")
    refused = estimate(browser, "bar", minutes=60)
    assert (
        refused
        == f"{chosen.replace('2 hours', '1 hour')} Your account may use 2 GPUs at most. Ask for fewer."
    )


@pytest.mark.parametrize("values", [{"nodes": 99}, {"minutes": "soon"}, {"image": "<b>"}])
def test_what_the_form_refuses_is_not_queried(
    browser: Browser, broker: FakeBroker, values: dict[str, Any]
) -> None:
    assert estimate(browser, **values) == ""
    assert not broker.requests_of("test")


def test_a_silent_cluster_is_reported(browser: Browser, broker: FakeBroker) -> None:
    broker.refusal = SlurmError("Slurm does not answer.", "Wait.", code="slurm-away")
    assert estimate(browser) == "Slurm does not answer. Wait."
    broker.refusal = None
    assert estimate(browser) == "Starts now. Cost in GPU-hours: 16."  # the failure is not remembered


def save(browser: Browser, **values: Any) -> str:
    answer = browser.send("/", "/sessions/presets/", **(FORM | values))
    return browser.get(answer["Location"]).content.decode() if answer.status_code == 302 else (
        answer.content.decode()
    )  # fmt: skip


def test_a_preset_is_saved_used_replaced_and_deleted(
    browser: Browser, bobs_browser: Browser, alice: User, broker: FakeBroker
) -> None:
    page = save(browser, title="Big <run>")
    assert "Saved as “Big &lt;run&gt;”." in page
    save(browser, title="Big <run>", nodes=1)
    preset = Preset.objects.get()
    assert preset.options["nodes"] == 1 and preset.owner == alice
    page = browser.get(f"/?{preset.query}").content.decode()
    assert 'name="nodes" value="1"' in page and 'value="Big &lt;run&gt;"' in page
    assert preset.name not in bobs_browser.get("/").content.decode()
    bobs_browser.send("/", f"/sessions/presets/{preset.pk}/delete/")
    assert Preset.objects.exists()
    browser.send("/", f"/sessions/presets/{preset.pk}/delete/")
    assert not Preset.objects.exists()


def test_a_wrong_form_is_no_preset(browser: Browser, broker: FakeBroker) -> None:
    assert "Start a session" in save(browser, title="x", nodes=99)
    assert not Preset.objects.exists()


def test_presets_have_an_end(browser: Browser, alice: User, broker: FakeBroker) -> None:
    Preset.objects.bulk_create(Preset(owner=alice, name=f"p{n}", options={}) for n in range(30))
    Preset.objects.update(options={"image": "torch", "minutes": 5})
    assert "You have 30 presets already. Delete one first." in save(browser, title="one more")
    save(browser, title="p7", nodes=2)
    assert Preset.objects.count() == 30 and Preset.objects.get(name="p7").options["nodes"] == 2


def test_an_address_fills_the_form_in_and_nothing_else(browser: Browser, broker: FakeBroker) -> None:
    page = browser.get("/?image=keras&nodes=%22%3E%3Cscript%3E&name=s00000000").content.decode()
    chosen = BeautifulSoup(page, "html.parser").select("input[name=image][checked]")
    assert [choice["value"] for choice in chosen] == ["keras"]
    assert '<script>"' not in page and '"><script>' not in page
    assert "s00000000" not in page


@pytest.mark.parametrize(
    ("free", "plan", "words"),
    [
        (8, [0, 0, 8], "Slurm plans to use 8 of them soon. 8 will be free again from"),
        (8, [6, 5, 4], "Slurm plans to use 2 of them soon."),
        (8, [8, 8, 8], "All GPUs are free."),
        (3, [3, 5, 7], "Slurm expects 7 to be free from"),
        (3, [3, 3, 3], "No more are expected"),
        (3, [8, 8, 8], "No more are expected"),  # the plan does not include what is in use now
    ],
)
def test_the_plan_does_not_contradict_what_is_free_now(free: int, plan: list[int], words: str) -> None:
    kind = GpuForecast(gpu_type="a100", total=8, queued=0, free=plan)
    forecast = Forecast(start=timezone.now(), step_minutes=30, kinds=[kind])
    (reported,) = supply_plan.shown([Supply(kind="a100", free=free, total=8, per_node=4)], forecast)
    assert words in reported.words
    assert f"expects {free} to be free" not in reported.words


def test_the_dashboard_shows_what_will_be_free(browser: Browser, broker: FakeBroker) -> None:
    now = timezone.now()
    broker.put(make_job(1, user="bob", gpus=4, minutes_limit=120, started=now))
    broker.put(make_job(2, user="bob", state="PENDING", gpus=3, node_list=""))
    page = browser.get("/live/").content.decode()
    assert "3 queued" in page and "Slurm expects 4 to be free from" in page
    page = BeautifulSoup(page, "html.parser")
    (when,) = page.select("#supply-1 .hint time")
    assert when["title"] and when["data-style"] == "short"
    assert [cell.text for cell in page.select(".free-days thead th")] == ["Hour", *map(str, range(0, 24, 3))]
    blocks = [cell for cell in page.select(".free-days tbody td") if cell.text]
    # The running job has all of n1 for two hours; n2 takes no jobs.
    assert (blocks[0].text, blocks[0]["class"]) == ("0", ["level-0"])
    assert (blocks[-1].text, blocks[-1]["class"]) == ("4", ["level-2"])
    assert str(blocks[-1]["data-tip"]).endswith(": 4 of 8 free")
    assert (
        len(blocks) in (24, 25) and 3 <= len(page.select(".free-days tbody tr")) <= 4
    )  # three days, whenever they begin
    broker.queue.clear()
    assert "No more are expected" in browser.get("/live/").content.decode()
