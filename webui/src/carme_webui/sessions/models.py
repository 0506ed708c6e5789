"""A session: what its owner requested, and what the broker says about it."""

import secrets
import string
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

from django.conf import settings
from django.db import models, transaction
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from pydantic import ValidationError

from carme.images import app_path
from carme.jobs import SessionOptions, stage_text, without_log
from carme.sessions import ENDINGS, STATES, TRANSITIONS, Ending, SessionState, Step
from carme.sessions import Session as SessionReport
from carme.translation import translated
from carme_webui.accounts.models import User
from carme_webui.jobs.models import Job
from carme_webui.profile.kinds import Kind
from carme_webui.profile.notices import notify
from carme_webui.sentences import SentenceField

__all__ = ["NAME_PATTERN", "Preset", "Session", "new_name", "query_of", "values_of"]

#: So many of those that have ended are shown.
RECENT_COUNT = 5

NAME_PATTERN = r"s[a-z0-9]{8}"


def _before() -> dict[SessionState, list[SessionState]]:
    """For each state those from which the table leads there, in any number of steps."""
    reached: dict[SessionState, set[SessionState]] = {}
    for state in SessionState:
        todo = set(TRANSITIONS[state])
        found: set[SessionState] = set()
        while todo:
            found.add(following := todo.pop())
            todo |= TRANSITIONS[following] - found
        reached[state] = found
    return {to: [state for state in SessionState if to in reached[state]] for to in SessionState}


# The broker reports a session's latest state only; those between it may have gone through unseen.
BEFORE = _before()

# How far a start has come, after the last step that is known.
PROGRESS = {
    Step.ALLOCATED: gettext_lazy("Preparing its nodes."),
    Step.PROLOG: gettext_lazy("Starting the container."),
    Step.CONTAINER: gettext_lazy("Starting the notebook server in its container."),
    Step.LISTENING: gettext_lazy("The notebook server is up. Connecting."),
}


def new_name() -> str:
    """A fresh name of a session: `s` and 8 characters."""
    letters = string.ascii_lowercase + string.digits
    return "s" + "".join(secrets.choice(letters) for _ in range(8))


class Preset(models.Model):
    """Options of a session that their owner starts often."""

    owner = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    name = models.CharField(max_length=80)
    options = models.JSONField()

    class Meta:
        ordering = ("name",)
        constraints = (models.UniqueConstraint(fields=["owner", "name"], name="one_preset_of_a_name"),)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def of(cls, user: User) -> "list[Preset]":
        """A user's."""
        return list(cls.objects.filter(owner=user))

    @property
    def query(self) -> str:
        """The query of the address that fills the form in."""
        return query_of(SessionOptions.model_validate(self.options))


def query_of(options: SessionOptions) -> str:
    """Options as the query of the form's address, in its words; what is not given is left to the form."""
    values = values_of(options.model_copy(update={"image_file": None}))
    return urlencode({key: value for key, value in values.items() if value not in (None, "")})


def values_of(options: SessionOptions) -> dict[str, Any]:
    """Options as the values of the form's fields."""
    values = options.model_dump(exclude={"prediction"}) | {"stage": stage_text(options.stage)}
    if prediction := options.prediction:
        values |= {"scaling": prediction.file, "steps": prediction.steps, "reason": prediction.reason}
    return values


class Session(models.Model):
    """One interactive session: a named server of JupyterHub and its Slurm job `session-NAME`.

    The states are those of `carme.sessions`. The portal itself decides `requested`, `stopping` when its owner
    stops it here, and `ended` as long as there is no job; all else is what the broker says.
    """

    name = models.CharField(max_length=9, unique=True)
    owner = models.ForeignKey(User, on_delete=models.CASCADE)
    options = models.JSONField()
    # In which JupyterLab begins: that of the owner's pages when they requested it; empty: not known.
    language = models.CharField(max_length=10, blank=True, default="")
    state = models.CharField(max_length=16, default=SessionState.REQUESTED.value, db_index=True)
    ending = models.CharField(max_length=32, blank=True)
    sentence = SentenceField(blank=True)
    job_id = models.BigIntegerField(null=True)
    # What the broker reported last, a `carme.sessions.Session`; null as long as it knows of no job.
    reported = models.JSONField(null=True)
    created = models.DateTimeField(default=timezone.now)
    changed = models.DateTimeField(default=timezone.now)
    # When the hub was called last, to start or to stop it.
    requested_at = models.DateTimeField(null=True)
    # It is over and neither the hub nor Slurm holds anything of it.
    settled = models.BooleanField(default=False, db_index=True)

    class Meta:
        ordering = ("-created",)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def recent_of(cls, user: User, since: datetime) -> "list[Session]":
        """A user's that are not over, and a few of those that ended since then; the newest first."""
        rows = cls.objects.filter(owner=user)
        over = models.Q(state=SessionState.ENDED)
        latest = rows.filter(over, changed__gt=since).values("pk")[:RECENT_COUNT]
        found = list(rows.filter(~over | models.Q(pk__in=latest)))
        for row in found:
            row.owner = user
        return found

    @classmethod
    def request(
        cls, owner: User, options: SessionOptions, name: str, language: str = ""
    ) -> tuple["Session", bool]:
        """The session `name` of this owner, and whether it was made now.

        The name comes with the form, so that a form sent twice makes one session.

        Args:
            owner: Whose it is.
            options: What they request.
            name: The session's.
            language: In which JupyterLab begins, such as "de"; empty: JupyterLab's own.
        """
        with transaction.atomic():
            session, created = cls.objects.get_or_create(
                name=name,
                defaults={"owner": owner, "options": options.model_dump(), "language": language},
            )
        if session.owner != owner:
            return cls.request(owner, options, new_name(), language)
        return session, created

    def move(self, to: SessionState, **fields: Any) -> bool:
        """Go to another state if the table allows it from the state in the database.

        Args:
            to: The new state.
            fields: Other fields to set with it.

        Returns:
            Whether it did; otherwise somebody else was faster, and this object has the state that holds.
        """
        sources = [state for state in SessionState if to in TRANSITIONS[state]]
        moved = self._rows().filter(state__in=sources).update(state=to, changed=timezone.now(), **fields)
        self.refresh_from_db()
        return bool(moved)

    def follow(self, reported: SessionReport) -> None:
        """Take over what the broker says.

        A session that its owner stopped, or that ended here, does not come back to life: then only the job
        and what else is known about it are noted.
        """
        if reported.owner != self.owner.username:
            return  # anybody may give a job any name
        known = {"reported": reported.model_dump(mode="json"), "job_id": reported.job_id}
        words = {"sentence": reported.sentence, "ending": reported.ending or ""}
        with transaction.atomic():
            rows = self._rows()
            if (
                reported.is_over
            ):  # maybe of an earlier job; one that Slurm lost may come back with a lower number
                rows = rows.exclude(job_id__gt=reported.job_id)
            earlier = rows.filter(state__in=BEFORE[reported.state]).exclude(state=reported.state)
            arrived = earlier.update(state=reported.state, changed=timezone.now(), **words, **known)
            if not (arrived or rows.filter(state=reported.state).update(**words, **known)):
                rows.update(**known, settled=False)
        self.refresh_from_db()
        if arrived:
            self._announce()

    def _announce(self) -> None:
        """Notify its owner of what it has come to."""
        if self.state == SessionState.READY:
            notify(
                self.owner,
                lambda: _("Your session “%s” is ready.") % self.title,
                Kind.SESSION_READY,
                key=f"ready:{self.name}",
                link=self.get_absolute_url(),
            )
        elif self.is_over and self.failed:
            notify(
                self.owner,
                lambda: (
                    _("Your session “%(title)s” is over: %(how)s. %(why)s")
                    % {"title": self.title, "how": self.label, "why": translated(self.explanation)}
                ),
                Kind.SESSION_OVER,
                key=f"over:{self.name}",
                link=self.get_absolute_url(),
            )

    def _rows(self) -> "models.QuerySet[Session]":
        """This row."""
        return Session.objects.filter(pk=self.pk)

    @property
    def last_reported(self) -> SessionReport | None:
        """What the broker reported last; None as long as it knows of no job."""
        if self.reported is None:
            return None
        try:
            return SessionReport.model_validate(self.reported)
        except ValidationError:
            return None  # of an earlier version; the next event replaces it

    @property
    def requested_options(self) -> SessionOptions:
        """What the owner requested."""
        return SessionOptions.model_validate(self.options)

    @property
    def title(self) -> str:
        """The owner's title, else the image's name."""
        return self.options["title"] or self.options["image"]

    @property
    def job(self) -> Job | None:
        """Its Slurm job, once Slurm has it."""
        if self.job_id is None:
            return None
        return Job.objects.filter(id=self.job_id).first()

    @property
    def is_over(self) -> bool:
        """It has ended."""
        return self.state == SessionState.ENDED

    @property
    def failed(self) -> bool:
        """It ended in a way that its owner did not want."""
        return bool(self.ending) and ENDINGS[Ending(self.ending)][1]

    @property
    def label(self) -> str:
        """The state in users' words; an ended session says how it ended."""
        return _(ENDINGS[Ending(self.ending)][0] if self.ending else STATES[SessionState(self.state)])

    @property
    def tone(self) -> str:
        """The look of the state; its first word is the state itself."""
        return f"{self.state} failed" if self.failed else self.state

    @property
    def explanation(self) -> str:
        """Why the session is in this state, in plain words; the end of a log has its own place."""
        if self.sentence:
            return without_log(self.sentence)
        reported = self.last_reported
        match self.state:
            case SessionState.REQUESTED:
                return _("Sending the request to Slurm.")
            case SessionState.STARTING if reported is not None and reported.marks:
                return str(PROGRESS.get(reported.marks[-1].step, ""))
            case SessionState.STOPPING:
                return _("Stopping its programs and freeing its nodes.")
        return ""

    @property
    def wants_log(self) -> bool:
        """Whether its owner should see the end of its log."""
        return self.failed and self.job_id is not None

    def address(self, app: str) -> str:
        """Where an app of the running session is."""
        base = settings.SITE.hub.base_path
        # As JupyterHub quotes names; notebooks and nginx know them by no other.
        return f"{base}user/{quote(self.owner.username, safe='@~')}/{self.name}/{app_path(app)}"

    def get_absolute_url(self) -> str:
        return reverse("session", args=[self.name])
