"""The section of a job's page that draws the Petri net that the job runs."""

import base64

from bs4 import BeautifulSoup, Tag

from carme.broker.protocol import NetPicture
from carme_webui.jobs.models import Job

from .conftest import Browser
from .fake_broker import NOW, FakeBroker, make_job


def test_a_job_draws_its_petri_net_as_an_image(
    browser: Browser, bobs_browser: Browser, broker: FakeBroker
) -> None:
    Job.store([broker.put(make_job(7, kind="batch", started=NOW))])
    assert BeautifulSoup(browser.get("/jobs/7/").content, "html.parser").select_one(
        "#net[hx-get='/jobs/7/net/']"
    )

    def section() -> Tag:
        found = BeautifulSoup(browser.get("/jobs/7/net/").content, "html.parser").select_one("#net")
        assert found is not None
        return found

    assert section().has_attr("hidden") and section()["hx-trigger"] == "state from:body, every 20s"
    svg = "<svg><script>alert(1)</script></svg>"
    drawn = NetPicture(
        name="<b>", state="running", at=NOW.timestamp(), running=2, ended=40, tokens=9, svg=svg
    )
    broker.nets[7] = drawn
    shown = section()
    assert not shown.has_attr("hidden") and shown["hx-trigger"] == "state from:body, every 3s"
    assert "Petri net <b>" in shown.text and "Running tasks: 2. Ended tasks: 40. Tokens: 9." in shown.text
    (image,) = shown.select("img")
    kind, _, data = str(image["src"]).partition(",")
    assert kind == "data:image/svg+xml;base64" and base64.b64decode(data).decode() == svg
    assert not shown.select("svg, script, b")
    broker.nets[7] = drawn.model_copy(
        update={"state": "failed", "error": "Transition <i> failed.", "svg": ""}
    )
    assert "It has failed. Transition <i> failed." in section().text
    assert not section().select("img, i") and "too large to be drawn" in section().text
    assert bobs_browser.get("/jobs/7/net/").status_code == 404
    Job.store([broker.put(make_job(7, kind="batch", started=NOW, ended=NOW, state="COMPLETED"))])
    assert not section().has_attr("hx-get")


def test_a_net_stays_as_it_is_shown_while_the_broker_does_not_answer(
    browser: Browser, broker: FakeBroker
) -> None:
    Job.store([make_job(7, kind="batch", started=NOW)])  # which the broker does not know
    assert browser.get("/jobs/7/net/").status_code == 204
