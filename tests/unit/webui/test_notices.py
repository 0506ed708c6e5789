"""What users are notified of, on pages and by mail: as they choose, once, through a real mail server."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from email import message_from_bytes
from email.header import decode_header, make_header
from email.message import Message
from typing import Any

import pytest
from aiosmtpd.smtp import SMTP
from auditlog.models import LogEntry
from django.conf import settings as django_settings
from django.utils import timezone

from carme.bookings import BookingState, Cause
from carme.broker.policy import Alert
from carme.config.settings import PolicySettings
from carme_webui.accounts.models import User
from carme_webui.bookings import services
from carme_webui.bookings.models import Booking
from carme_webui.bookings.reconcile import reconcile
from carme_webui.cluster import broker as site_broker
from carme_webui.jobs.mirror import mirror
from carme_webui.jobs.tasks import warn
from carme_webui.jobs.warnings import send_warnings
from carme_webui.profile.kinds import ABOUT, Kind
from carme_webui.profile.mails import AGAIN, send_due
from carme_webui.profile.models import Mailing, Notice
from carme_webui.profile.notices import notify, unread
from carme_webui.projects import services as projects
from carme_webui.projects.models import Project
from carme_webui.sessions.models import Session
from carme_webui.sessions.tasks import warn_of_ends
from patience import HANG

from .conftest import Browser
from .fake_broker import NOW, FakeBroker, make_job, make_session
from .test_bookings import make


class MailServer:
    """A real SMTP server; `answer` is what it says to the content of a mail."""

    def __init__(self) -> None:
        self.answer = "250 OK"
        self.mails: list[Message] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(self._start())
        self.port = self._server.sockets[0].getsockname()[1]

    async def _start(self) -> asyncio.Server:
        # The address is bound once, so that nobody else can take it.
        return await self._loop.create_server(lambda: SMTP(self, loop=self._loop), "127.0.0.1", 0)

    def _call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANG)

    async def handle_DATA(self, server, session, envelope) -> str:
        if self.answer.startswith("250"):
            self.mails.append(message_from_bytes(envelope.content))
        if self.answer.endswith("gone"):
            server.transport.abort()
        return self.answer

    def stop(self) -> None:
        async def close() -> None:
            self._server.close()

        self._call(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture
def post(settings) -> Iterator[MailServer]:
    """The site's mail server."""
    server = MailServer()
    mail = django_settings.SITE.mail.model_copy(update={"server": "127.0.0.1", "port": server.port})
    settings.SITE = django_settings.SITE.model_copy(update={"mail": mail})
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT, settings.EMAIL_USE_TLS = "127.0.0.1", server.port, False
    yield server
    server.stop()


@pytest.fixture
def reachable(alice: User) -> User:
    """Alice, who has an address."""
    alice.email = "alice@example.org"
    alice.save()
    return alice


def subject(mail: Message) -> str:
    return str(make_header(decode_header(mail["Subject"])))


def body(mail: Message) -> str:
    content = mail.get_payload(decode=True)
    assert isinstance(content, bytes)
    return content.decode()


def notices_of(user: User, kind: Kind) -> list[str]:
    return list(Notice.objects.filter(user=user, kind=kind).values_list("text", flat=True))


# --- mails -----------------------------------------------------------------------------------------------


def test_a_mail_comes_once_with_its_link(post: MailServer, reachable: User) -> None:
    notify(reachable, "A node has been drained.", key="x", link="/bookings/")
    assert not notify(reachable, "Said again.", key="x")
    assert send_due() == 1 and send_due() == 0
    [mail] = post.mails
    assert mail["To"] == "alice@example.org" and mail["Auto-Submitted"] == "auto-generated"
    assert subject(mail) == "Test & site: A node has been drained."
    assert "https://carme.example:8443/bookings/" in body(mail) and "/profile/" in body(mail)
    assert mail["Message-ID"].endswith("@carme.example>")


def test_many_workers_send_each_mail_once(post: MailServer, reachable: User) -> None:
    for number in range(5):
        notify(reachable, f"Sentence {number}.")
    due = list(Notice.objects.values_list("pk", flat=True))
    # Another worker took one of them at the same moment, and was killed.
    assert Notice.objects.filter(pk=due[2], mailing=Mailing.DUE).update(mailing=Mailing.BEING_SENT)
    assert send_due() == 4 and send_due() == 0
    assert sorted(subject(mail)[-2] for mail in post.mails) == ["0", "1", "3", "4"]


def test_a_server_that_is_busy_is_queried_again_and_one_that_refuses_is_not(
    post: MailServer, reachable: User
) -> None:
    notify(reachable, "Something.")
    post.answer = "451 Try again later"
    assert send_due() == 0
    [notice] = Notice.objects.all()
    assert notice.mailing == Mailing.DUE and notice.tries == 1 and notice.due > timezone.now()
    assert send_due() == 0, "not before it is time"
    Notice.objects.update(due=timezone.now())
    post.answer = "550 No such user"
    assert send_due() == 0
    notice.refresh_from_db()
    assert notice.mailing == Mailing.REFUSED
    post.answer = "250 OK"
    Notice.objects.update(due=timezone.now())
    assert send_due() == 0 and not post.mails


def test_a_server_that_is_away_loses_nothing(post: MailServer, reachable: User, settings) -> None:
    notify(reachable, "Something.")
    with socket.socket() as taken:  # bound and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        settings.EMAIL_PORT = taken.getsockname()[1]
        for _round in range(len(AGAIN) + 2):
            assert send_due() == 0
    assert Notice.objects.get().mailing == Mailing.DUE and Notice.objects.get().tries == 0
    settings.EMAIL_PORT = post.port
    assert send_due() == 1


def test_a_mail_that_is_never_taken_is_given_up(post: MailServer, reachable: User) -> None:
    notify(reachable, "Something.")
    post.answer = "451 Try again later"
    for _number in (*AGAIN, 0):
        Notice.objects.update(due=timezone.now())
        assert send_due() == 0
    assert Notice.objects.get().mailing == Mailing.REFUSED


def test_a_mail_that_may_have_been_taken_is_not_sent_again(post: MailServer, reachable: User) -> None:
    notify(reachable, "One.")
    notify(reachable, "Two.")
    post.answer = "250 OK, and gone"
    assert send_due() == 0 and len(post.mails) == 1
    post.answer = "250 OK"
    for _round in range(2):
        send_due()
    assert sorted(subject(mail)[-4:] for mail in post.mails) == ["One.", "Two."]


@pytest.mark.parametrize("address", ["nobody", "a@b\nBcc: all@example.org", "ä@example.org\r\n", "@"])
def test_an_invalid_address_delays_no_other_mail(post: MailServer, reachable: User, address: str) -> None:
    unreachable = User.objects.create(username="carol", email=address)
    notify(unreachable, "One.")
    notify(reachable, "Two.\r\nSubject: three")
    send_due()
    mail = next(mail for mail in post.mails if mail["To"] == "alice@example.org")
    assert subject(mail) == "Test & site: Two. Subject: three"
    assert all("Bcc" not in mail for mail in post.mails)


def test_without_a_server_or_an_address_there_are_no_mails(alice: User, post: MailServer, settings) -> None:
    notify(alice, "One.")
    alice.email = "alice@example.org"
    settings.SITE = django_settings.SITE.model_copy(
        update={"mail": django_settings.SITE.mail.model_copy(update={"server": ""})}
    )
    notify(alice, "Two.")
    assert not Notice.objects.exclude(mailing=Mailing.NONE) and send_due() == 0
    assert unread(alice) == 2


# --- choices ---------------------------------------------------------------------------------------------


def test_earlier_notices_are_on_further_pages(browser: Browser, alice: User) -> None:
    for number in range(21):
        notify(alice, lambda number=number: f"Notice number {number}.")
    latest = browser.get("/profile/").content.decode()
    assert "Notice number 20." in latest and "Notice number 0." not in latest
    assert 'href="?page=2"' in latest
    assert "Notice number 0." in browser.get("/profile/?page=2").content.decode()


def test_each_user_chooses(browser: Browser, reachable: User, post: MailServer) -> None:
    page = browser.get("/profile/").content.decode()
    assert "A batch job has ended" in page and "waits for approval" not in page

    def choose(**what: list[str]) -> None:
        browser.send_with(browser.token("/profile/"), "/profile/notify/", **what)

    choose(page=["job-over", "nonsense"], mail=["job-over"])
    reachable.refresh_from_db()
    notify(reachable, "Job.", Kind.JOB_OVER)
    notify(reachable, "Ready.", Kind.SESSION_READY)
    notify(reachable, "Ends.", Kind.SESSION_ENDS)
    assert not notices_of(reachable, Kind.SESSION_READY) and not notices_of(reachable, Kind.SESSION_ENDS)
    notify(reachable, "Account.", Kind.ACCOUNT)  # what cannot be turned off
    assert unread(reachable) == 2 and send_due() == 1
    choose(mail=["session-ends"])
    reachable.refresh_from_db()
    notify(reachable, "Ends soon.", Kind.SESSION_ENDS)
    assert unread(reachable) == 2 and send_due() == 1, "by mail alone"
    assert "Ends soon" not in browser.get("/profile/").content.decode()
    assert set(reachable.wanted) <= set(Kind) and len(ABOUT) == len(Kind)


def test_language_and_look_are_chosen(browser: Browser, alice: User) -> None:
    assert "data-theme" not in browser.get("/profile/").content.decode()
    browser.send("/profile/", "/profile/appearance/", language="de", theme="dark")
    page = browser.get("/profile/").content.decode()
    assert '<html lang="de" data-theme="dark">' in page
    for strange in ({"theme": "pink"}, {"language": "tlh"}, {"theme": '"><script>'}):
        browser.send("/profile/", "/profile/appearance/", **strange)
        alice.refresh_from_db()
        assert (alice.language, alice.theme) == ("de", "dark")
    browser.send("/profile/", "/profile/appearance/", language="", theme="")
    assert '<html lang="en">' in browser.get("/profile/").content.decode()
    german = browser.get("/profile/", headers={"accept-language": "de-CH,de;q=0.9"})
    assert '<html lang="de">' in german.content.decode()


# --- what is sent ----------------------------------------------------------------------------------------


def test_a_session_that_is_ready_ends_soon_or_fails(alice: User) -> None:
    alice.wanted = {"session-ready": [True, False]}
    alice.save()
    row, _new = Session.request(alice, make_options(), "s12345678")
    now = timezone.now()
    passed = now - timedelta(minutes=1)  # what threatened before its hub was restarted
    ready = make_session("s12345678", ends=now + timedelta(minutes=10, seconds=30), stops_idle=passed)
    for _round in range(2):
        row.follow(ready)
        warn_of_ends(now)
    assert notices_of(alice, Kind.SESSION_READY) == ["Your session “torch” is ready."]
    [sentence] = notices_of(alice, Kind.SESSION_ENDS)
    assert sentence.startswith("Your session “torch” ends in 10 min")
    row.follow(make_session("s12345678", state="ended", ending="out_of_memory", sentence="It needed more."))
    assert len(notices_of(alice, Kind.SESSION_OVER)) == 1


def make_options():
    from carme.jobs import SessionOptions

    return SessionOptions(image="torch", minutes=60)


def test_jobs_that_end_are_reported_once_and_many_together(alice: User, broker: FakeBroker) -> None:
    alice.wanted = {"job-over": [True, False]}
    alice.save()
    for number in (1, 11, 12, 13, 14):
        broker.put(make_job(number, kind="batch"))
    broker.put(make_job(2, kind="session"))
    mirror(site_broker())
    for number, kind in ((1, "batch"), (2, "session")):
        broker.put(make_job(number, kind=kind, state="COMPLETED", ended=timezone.now()))
    mirror(site_broker())
    mirror(site_broker())
    [notice] = notices_of(alice, Kind.JOB_OVER)
    assert "Your job 1 (job 1) has ended: completed." in notice
    for number in (11, 12, 13, 14):
        broker.put(make_job(number, kind="batch", state="FAILED", ended=timezone.now()))
    mirror(site_broker())
    assert sorted(notices_of(alice, Kind.JOB_OVER))[0] == "4 of your jobs have ended."


def test_what_the_policy_about_alerts_does_is_reported_as_the_user_wants_it(
    post: MailServer, reachable: User, broker: FakeBroker, settings: Any
) -> None:
    policy = PolicySettings(warnings=2, every_minutes=60, stop=True)
    monitoring = settings.SITE.monitoring.model_copy(update={"policy": policy})
    settings.SITE = settings.SITE.model_copy(update={"monitoring": monitoring})
    broker.restart()  # it reads the policy
    alerts = []
    for number, user in ((7, "alice"), (8, "nobody-here")):
        broker.put(make_job(number, user=user, started=NOW))
        about = {"summary": f"Job {number}: GPU 0 has not been used.", "advice": "Cancel it."}
        alerts.append(Alert(name="CarmeGpuIdle", job_id=number, user=user, **about))
    broker.fire(alerts, NOW)
    for _round in range(2):
        send_warnings(site_broker())
    assert notices_of(reachable, Kind.JOB_WARNED) == [
        "Job 7: GPU 0 has not been used. Cancel it. This is warning 1 of 2: unless that changes, the job is "
        "stopped at 2026-11-20 14:00 UTC."
    ]
    assert send_due() == 1 and "https://carme.example:8443/jobs/7/" in body(post.mails[0])
    # The second is not wanted; the stop is sent all the same.
    reachable.wanted = {"job-warned": [False, False]}
    reachable.save()
    broker.fire(alerts, NOW + timedelta(hours=1))
    send_warnings(site_broker())
    assert len(notices_of(reachable, Kind.JOB_WARNED)) == 1
    broker.fire(alerts, NOW + timedelta(hours=2))
    assert 7 in broker.archive
    for _round in range(2):
        send_warnings(site_broker())
    assert notices_of(reachable, Kind.ACCOUNT) == [
        "Your job 7 was stopped after 2 warnings: Job 7: GPU 0 has not been used."
    ]
    # Another job with this number.
    later = NOW + timedelta(days=1)
    broker.put(make_job(7, started=later))
    broker.fire(alerts, later)
    reachable.wanted = {}
    reachable.save()
    send_warnings(site_broker())
    assert len(notices_of(reachable, Kind.JOB_WARNED)) == 2


def test_a_broker_that_is_away_delays_warnings(caplog: pytest.LogCaptureFixture) -> None:
    warn()
    assert "Owners of jobs are notified of alerts later: The broker" in caplog.text


def test_a_booking_is_decided_begins_and_is_given_back(
    alice: User,
    bob: User,
    broker: FakeBroker,
    rules: Callable[..., None],
) -> None:
    admin = User.objects.create(username="root1", is_staff=True)
    requested = make(alice, state=BookingState.REQUESTED)
    services.approve(requested, site_broker())
    refused = make(alice, state=BookingState.REQUESTED, node_names=["n2"])
    services.deny(refused)
    words = notices_of(alice, Kind.BOOKING_DECIDED)
    assert len(words) == 2 and "is refused" in words[0] and "is approved" in words[1]
    now = timezone.now()
    begun = make(alice, -20, 60, users=["bob"], node_names=["n2"], reserved=now - timedelta(minutes=20))
    broker.reservations[begun.name] = _reservation_of(begun)
    for _round in range(2):
        reconcile(site_broker(), now)
    assert len(notices_of(alice, Kind.BOOKING_BEGINS)) == len(notices_of(bob, Kind.BOOKING_BEGINS)) == 1
    assert ["Given back" in notice for notice in notices_of(alice, Kind.BOOKING_ENDED)] == [True]
    assert not notices_of(admin, Kind.APPROVAL)


def _reservation_of(row: Booking):
    from carme.jobs import Reservation

    return Reservation(
        **row.reservation_spec.model_dump(include={"name", "start", "end", "node_names", "users"})
    )


def test_every_move_of_a_booking_is_on_record(alice: User, broker: FakeBroker) -> None:
    row = make(alice, state=BookingState.REQUESTED)
    assert row.move(BookingState.APPROVED) and row.move(Cause.CANCELLED)
    assert not row.move(BookingState.ACTIVE)
    changes = LogEntry.objects.get_for_object(row).values_list("changes", flat=True)
    states = [change["state"] for change in changes if "state" in change]
    assert ["requested", "approved"] in states and ["approved", "ended"] in states
    assert any(change.get("cause") == ["", "cancelled"] for change in changes)


def test_managers_hear_of_gpu_hours_and_users_of_invitations(
    alice: User, bob: User, broker: FakeBroker
) -> None:
    from carme_webui.projects.reconcile import reconcile as reconcile_projects

    admin = User.objects.create(username="root1", is_staff=True)
    created = projects.create(admin, "vision", "Computer vision", alice, site_broker())
    projects.limit(admin, created, {"gpu_hours": 100}, site_broker())
    projects.invite(alice, created, "bob")
    assert notices_of(bob, Kind.PROJECT) == ["alice invites you to the project “Computer vision”."]
    account = broker.granted[created.account]
    for hours in (10, 81, 82, 100, 120):
        use = account.use.model_copy(update={"gpu_hours": float(hours)})
        broker.granted[created.account] = broker.granted[created.account].model_copy(update={"use": use})
        reconcile_projects(site_broker())
    assert notices_of(alice, Kind.QUOTA) == [
        "The project “Computer vision” has used 100 of its 100 GPU-hours.",
        "The project “Computer vision” has used 81 of its 100 GPU-hours.",
    ]
    assert not notices_of(bob, Kind.QUOTA) and Project.objects.get().use.gpu_hours == 120
