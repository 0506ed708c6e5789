"""Help: the guides that the portal serves itself, hints for newcomers, and words that explain themselves."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from bs4 import BeautifulSoup, Tag

from carme.errors import SlurmError
from carme.help import SECTIONS, help_path
from carme.jobs import JobState, SessionOptions
from carme.translation import Message, message
from carme_webui import guides
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job
from carme_webui.sessions.models import Session

from .conftest import Browser, text, words
from .fake_broker import FakeBroker, make_job

DOCUMENTATION = Path(__file__).resolve().parents[3] / "docs/users"


def soup(browser: Browser, path: str) -> BeautifulSoup:
    answer = browser.get(path)
    assert answer.status_code == 200, path
    return BeautifulSoup(answer.content, "html.parser")


def test_all_guides_of_the_documentation_are_served(browser: Browser) -> None:
    names = {path.stem for path in DOCUMENTATION.glob("*.md")}
    page = soup(browser, "/help/")
    listed = [str(link["href"]) for link in page.select("nav.guides a")]
    assert {link.split("/")[2] for link in listed} == names and listed[0] == "/help/sessions/"
    assert browser.get("/help/nothing/").status_code == 404


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The help's pages that were opened, by their addresses: each guide has links to all others."""
    return {}


@pytest.mark.parametrize("name", sorted(path.stem for path in DOCUMENTATION.glob("*.md")))
def test_a_guide_has_its_headings_pictures_and_links_here(
    browser: Browser, pages: dict[str, str], name: str
) -> None:
    page = soup(browser, f"/help/{name}/")
    source = (DOCUMENTATION / f"{name}.md").read_text()
    outside = re.sub(r"^(```|~~~).*?^\1", "", source, flags=re.S | re.M)
    article = page.select_one("article.guide")
    assert isinstance(article, Tag)
    titles = [re.sub("`", "", title) for title in re.findall(r"^## (.+)$", outside, flags=re.M)]
    assert [heading.text for heading in article("h2")] == titles
    anchors = {str(element["id"]) for element in page.select("[id]")}
    for link in page.select(".guide a, .guide-menu a"):
        parts = urlsplit(str(link["href"]))
        assert not parts.scheme or parts.scheme in ("http", "https"), link
        if not parts.netloc and not parts.path:
            assert parts.fragment in anchors, link
        elif not parts.netloc and parts.path.startswith("/help/"):
            if parts.path not in pages:
                answer = browser.get(parts.path)
                assert answer.status_code == 200, link
                pages[parts.path] = text(answer)
            assert not parts.fragment or f'id="{parts.fragment}"' in pages[parts.path], link
    for picture in article("img"):
        assert re.match(r"/static/docs/[\w-]+\.[0-9a-f]{12}\.(png|svg)$", str(picture["src"])), picture
        assert browser.get(str(picture["src"])).status_code == 200 and picture["alt"]


def test_markup_in_a_guide_is_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text(
        "# One\n<script>alert(1)</script>\n\n## A `b`\n[x](javascript:alert(1)) [y](../admins/z.md)\n"
        "[z](other.md#p)\n\n```sh\n<b>\n```\n\n| a | b |\n|---|---|\n| c | d |\n"
    )
    (tmp_path / "other.md").write_text("# Other\n")
    monkeypatch.setattr(guides, "FOLDER", tmp_path)
    found = guides._read("one")
    assert found.title == "One" and found.sections == (("a-b", "A b"),)
    page = BeautifulSoup(found.content, "html.parser")
    assert not page("script") and "&lt;script&gt;" in found.content and "&lt;b&gt;" in found.content
    assert [link["href"] for link in page("a")] == ["/help/", "/help/other/#p"]
    assert page.select_one("div.table-scroll[tabindex='0'] table") is not None


def test_the_help_of_a_page_leads_to_its_own_section_and_guide(browser: Browser, broker: FakeBroker) -> None:
    sections = {section["id"]: section for section in soup(browser, "/help/").select("section[id]")}
    for path, section, guide in (
        ("/", "", ""),
        ("/jobs/", "jobs", "usage"),
        ("/images/", "images", "images"),
        ("/datasets/", "datasets", "data"),
        ("/profile/", "profile", "account"),
    ):
        (link,) = soup(browser, path).select("header .who-name[href^='/help/']")
        assert link["href"] == f"/help/{'#' + section if section else ''}"
        if section:
            assert sections[section].select_one(f"a[href='/help/{guide}/']") is not None


def test_a_newcomers_hint_is_dismissed_for_good_and_for_one(
    browser: Browser, bobs_browser: Browser, alice: User, broker: FakeBroker
) -> None:
    assert "First time here?" in words(browser.get("/"))
    answer = browser.send("/", "/profile/hints/welcome/")
    assert answer.status_code == 302 and answer["Location"] == "/"
    browser.send("/", "/profile/hints/welcome/")
    alice.refresh_from_db()
    assert alice.dismissed == ["welcome"]
    assert "First time here?" not in words(browser.get("/"))
    assert "First time here?" in words(bobs_browser.get("/"))
    assert browser.send("/", "/profile/hints/nothing/").status_code == 404
    assert browser.get("/profile/hints/welcome/").status_code == 405


def test_terms_of_slurm_are_explained_where_they_stand(
    browser: Browser, broker: FakeBroker, alice: User
) -> None:
    Job.store([make_job(7, kind="session", account="physics")])
    row, _ = Session.request(alice, SessionOptions(image="torch", minutes=60), "s12345678")
    Session.objects.filter(pk=row.pk).update(job_id=7)
    for path, names in (
        ("/", {"partition"}),
        ("/jobs/submit/", {"partition"}),
        ("/jobs/7/", {"partition", "account"}),
        (f"/sessions/{row.name}/", {"partition"}),
    ):
        page = soup(browser, path)
        shown = {
            str(element["popovertarget"]).removeprefix("term-") for element in page.select("button.term")
        }
        assert shown >= names, path
        for name in shown:
            (meaning,) = page.select(f"[popover]#term-{name}")
            assert len(meaning.text) > 20 and meaning.select_one("a[href='/help/#terms']")
    assert "What does “Partition” mean?" in text(browser.get("/"))


@pytest.mark.parametrize("section", sorted(SECTIONS))
def test_errors_lead_to_sections_that_there_are(browser: Browser, section: str) -> None:
    guide, _mark, anchor = section.partition("#")
    page = soup(browser, f"/help/{guide}/")
    assert not anchor or page.find(id=anchor) is not None
    path = help_path(Message("", SECTIONS[section][0], {}))
    assert path == f"/help/{guide}/#{anchor}".rstrip("#")


def test_pages_link_an_error_and_an_ending_to_the_help(
    browser: Browser, alice: User, broker: FakeBroker
) -> None:
    page = browser.send("/", "/sessions/start/", image="torch", nodes="9", gpus_per_node="0", minutes="60",
                        partition="gpu")  # fmt: skip
    error = BeautifulSoup(page.content, "html.parser").select_one(".errorlist")
    assert error is not None and error.select_one("a[href^='/help/sessions/#']") is not None
    ended = make_job(7, kind="batch", state=JobState.TIMEOUT, user="alice")
    Job.store([broker.put(ended)])
    (link,) = soup(browser, "/jobs/7/").select(".status.large a")
    assert link["href"] == "/help/sessions/#time"


def test_messages_of_actions_link_to_the_help_without_letting_markup_in(
    browser: Browser, alice: User, broker: FakeBroker
) -> None:
    Job.store([broker.put(make_job(7, kind="batch", user="alice"))])
    sentence = "Slurm's accounting allows {holder} at most {most}."
    broker.refusal = SlurmError(message(sentence, holder="<b>me</b>", most="1 GPU"))
    answer = browser.send("/jobs/7/", "/jobs/7/extend/", minutes="60")
    assert answer.status_code == 302
    notice = soup(browser, "/jobs/7/").select_one(".notice.bad")
    assert notice is not None and "<b>me</b>" in notice.text
    assert [link["href"] for link in notice("a")] == ["/help/projects/#accounts-and-qos-of-slurm"]
