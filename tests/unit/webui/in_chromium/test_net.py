"""The Petri net on the page of the job that runs it."""

import pytest
from playwright.sync_api import Page, expect

from carme.broker.protocol import NetPicture
from carme_runtime.petri import Net

from ..fake_broker import NOW, FakeBroker
from .conftest import keep, sign_in

pytestmark = pytest.mark.django_db(transaction=True)

#: What a job could write to run something in the page.
EVIL = "<script>parent.document.title = 'taken'</script><image href='x' onerror='parent.document.title = 1'/>"


def render() -> Net:
    net = Net("render")
    scenes, frames = net.place("scenes", str, tokens=["a", "b"]), net.place("frames", str)
    net.add("draw", scenes >> frames, str.upper)
    return net


def picture(running: int, **more: str) -> NetPicture:
    svg = str(render().draw()).replace("</svg>", f"{EVIL}</svg>")
    values = {"name": "render", "state": "running", "at": NOW.timestamp(), "running": running, "svg": svg}
    return NetPicture.model_validate(values | more)


def test_a_net_is_redrawn_while_it_runs(page: Page, sample_data: None, broker: FakeBroker) -> None:
    broker.nets[7] = picture(1)
    sign_in(page)
    page.goto("/jobs/7/")
    title, net = page.title(), page.locator("#net")
    expect(net.get_by_role("heading", name="Petri net render")).to_be_visible()
    expect(net).to_contain_text("It is running. Running tasks: 1.")
    image = net.get_by_role("img", name="Circles are places")
    expect(image).to_be_visible()
    page.wait_for_function("image => image.complete && image.naturalWidth > 100", arg=image.element_handle())
    keep(page, "journey-job-net")
    broker.nets[7] = picture(0, state="resting")
    expect(net).to_contain_text("Nothing can start any more. Running tasks: 0.")  # nothing is reloaded
    expect(image).to_be_visible()
    assert page.title() == title and not page.locator("#net svg, #net script").count()
