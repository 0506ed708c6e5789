"""What an owner does with an own image, from a page or through the API."""

import logging
import re
import secrets
from contextlib import suppress
from pathlib import PurePosixPath

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.translation import gettext as _
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from carme.broker import BrokerClient
from carme.errors import BrokerUnavailable, CarmeError, InvalidRequest, NotFound
from carme.files.client import FileError, Files
from carme.images import OWN_NAME, ImageCatalogue, ImageFile
from carme.images.building import MAXIMUM_TEXT, RECIPE, Built, ImageRecipe, build_command, check_text
from carme.jobs import Cluster, JobRequest, JobState
from carme.projects import NAME_PATTERN
from carme.translation import message
from carme_webui.accounts.models import User
from carme_webui.cluster import fitted
from carme_webui.images.models import ImageState, OwnImage
from carme_webui.notifier import notifier
from carme_webui.projects.models import Project
from carme_webui.titles import tidy

__all__ = ["MOST", "ImageIn", "ShareIn", "build", "delete", "settle", "settle_all", "share"]

logger = logging.getLogger(__name__)

#: Own images of one user.
MOST = 50
FOLDER = ".local/share/carme/images"
LONGEST_RESULT = 1 << 20


class ImageIn(BaseModel):
    """An image to be built: from a `definition`, or from `requirements`, lines for pip, on a site's image.

    Without a `folder` it lies in the owner's home. To share it with a `project`, name a folder that its
    members can read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(max_length=200, description="lower-case letters, digits, dots, hyphens, underscores")
    title: str = Field(default="", max_length=80)
    kind: str = Field(default="requirements", description="'definition' or 'requirements'")
    text: str = Field(max_length=MAXIMUM_TEXT)
    base: str = Field(default="", max_length=64, description="for requirements; by default the site's first")
    folder: str = Field(default="", max_length=4000, description="an absolute path")
    project: str = Field(default="", max_length=64)


class ShareIn(BaseModel):
    """Who may use an image besides its owner: the members of a `project`, or, without one, nobody.

    Name a folder that they can read where its file is not in one yet: it is copied there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: str = Field(default="", max_length=64)
    folder: str = Field(default="", max_length=4000, description="an absolute path")


def build(user: User, proposed: ImageIn, catalogue: ImageCatalogue, broker: BrokerClient) -> OwnImage:
    """Have a batch job of the user's build an image.

    Args:
        catalogue: The site's images.

    Raises:
        InvalidRequest: With the field, and what is expected.
        CarmeError: The job cannot be submitted.
    """
    _check(proposed, catalogue)
    title = tidy(proposed.title)
    project = _project(user, proposed.project)
    if project is not None and not proposed.folder:
        raise _unreadable()
    base = proposed.base or settings.SITE.images.default
    folder = proposed.folder.rstrip("/") or f"{Files(broker, user.username).home()}/{FOLDER}"
    file = _new_file(folder, proposed.name)
    text = proposed.text.replace("\r\n", "\n")
    recipe = ImageRecipe(
        kind="definition" if proposed.kind == "definition" else "requirements",
        text=text,
        base=base,
        file=file,
        shared=project is not None,
    )
    request = _request(proposed.name, recipe, broker.cluster(), project, user.username)
    if OwnImage.objects.filter(owner=user).count() >= MOST:
        raise InvalidRequest(_("You have %s images already.") % MOST, _("Delete one first."))
    try:
        with transaction.atomic():
            row = OwnImage.objects.create(
                owner=user,
                name=proposed.name,
                title=title,
                kind=recipe.kind,
                base=base if recipe.kind == "requirements" else "",
                text=text,
                project=project,
                file=file,
            )
    except IntegrityError:
        raise InvalidRequest(
            _("You have an image %r already.") % proposed.name,
            _("Choose another name, or delete that one."),
            field="name",
        ) from None
    try:
        row.job_id = broker.submit(request, user=user.username)
    except CarmeError:
        row.delete()
        raise
    row.save(update_fields=["job_id"])
    notifier.notify([user.username])
    return row


def _check(proposed: ImageIn, catalogue: ImageCatalogue) -> None:
    if not re.fullmatch(OWN_NAME, proposed.name):
        raise InvalidRequest(
            _(
                "An image's name has up to 31 lower-case letters, digits, dots, underscores and hyphens, and "
                "begins with a letter or digit."
            ),
            _("Choose such a name."),
            field="name",
        )
    if proposed.kind not in ("definition", "requirements"):
        raise InvalidRequest(
            _("An image is built from 'definition' or from 'requirements'."), _("Choose one."), field="kind"
        )
    try:
        check_text(proposed.kind, proposed.text)
        if proposed.kind == "requirements":
            catalogue.get(proposed.base or settings.SITE.images.default)
    except InvalidRequest as error:
        field = "base" if error.field == "image" else error.field
        raise InvalidRequest(error.message, error.remedy, field=field) from None


def _new_file(folder: str, name: str) -> str:
    """A file of its own for each build and copy, so a running session keeps its one; nothing is replaced."""
    file = f"{folder.rstrip('/')}/{name}-{secrets.token_hex(6)}.sif"
    try:
        ImageFile(file=file, digest=f"sha256:{'0' * 64}")
    except ValidationError:
        valid = False
    else:
        valid = ".." not in PurePosixPath(file).parts
    if not valid:
        raise InvalidRequest(
            _("The folder must be an absolute path without colons, commas and '..'."),
            _("Write it like /scratch/project/images, or leave it empty."),
            field="folder",
        )
    return file


def _project(user: User, name: str) -> Project | None:
    if not name:
        return None
    known = re.fullmatch(NAME_PATTERN, name)
    project = Project.of(user).filter(name=name).first() if known else None
    if project is None:
        raise InvalidRequest(
            _("You are not in this project (any more), or it is closed."),
            _("Choose another one, or none."),
            field="project",
        )
    return project


def _unreadable() -> InvalidRequest:
    return InvalidRequest(
        _("The members of the project cannot read your home."),
        _("Name a folder that they can read, like one on a shared file system."),
        field="folder",
    )


def share(row: OwnImage, proposed: ShareIn, broker: BrokerClient) -> None:
    """Let the members of a project use an image that is built, or nobody else than its owner any more.

    Raises:
        InvalidRequest: It is not ready, or there is no such project, or its members cannot read the file.
        CarmeError: The file cannot be copied; then all stays as it was.
    """
    if row.state != ImageState.READY:
        raise InvalidRequest(
            _("The image is not ready."), _("Wait until it is built, then share it."), field="project"
        )
    project = _project(row.owner, proposed.project)
    files = Files(broker, row.owner.username)
    before = PurePosixPath(row.file)
    if project == row.project and not proposed.folder:
        return
    if project is not None and not proposed.folder and before.is_relative_to(files.home()):
        raise _unreadable()
    # Another file: what others may read, and who could have it open, is settled by that alone.
    file = _new_file(proposed.folder or str(before.parent), row.name)
    files.copy(str(before), file, shared=project is not None)
    with transaction.atomic():
        now = OwnImage.objects.select_for_update().filter(pk=row.pk, file=row.file).first()
        if now is not None:
            now.file, now.project = file, project
            now.save(update_fields=["file", "project"])
    if now is None:
        files.remove(file)
        raise InvalidRequest(_("The image was changed meanwhile."), _("Check it, and try again."))
    reported = {row.owner.username, *_members(row.project), *_members(project)}
    row.refresh_from_db()
    # Sessions that run in it keep it open.
    with suppress(CarmeError):
        files.remove(str(before))
    notifier.notify(reported)


def _members(project: Project | None) -> list[str]:
    return list(project.memberships.values_list("user__username", flat=True)) if project else []


def _request(
    name: str, recipe: ImageRecipe, cluster: Cluster, project: Project | None, user: str
) -> JobRequest:
    """The job that builds: without GPUs, on one node, and with no more than its nodes have."""
    site = settings.SITE
    request = JobRequest(
        name=f"image-{name}",
        kind="batch",
        command=build_command(),
        files={RECIPE: recipe.model_dump_json()},
        minutes=site.images.build_minutes,
        account=project.account if project else None,
    )
    return fitted(request, cluster, user, site.images.build_cpus, site.images.build_memory_mb)


def settle_all(broker: BrokerClient) -> None:
    """See which builds have ended. May run twice, and by two workers at once."""
    for row in OwnImage.objects.filter(state=ImageState.BUILDING).select_related("owner"):
        try:
            settle(row, broker)
        except CarmeError as error:
            logger.warning("How the build of %s is cannot be seen now: %s", row, error)


def settle(row: OwnImage, broker: BrokerClient) -> None:
    """Note how a build has ended, if it has.

    Raises:
        CarmeError: Nothing can be queried.
    """
    if row.state != ImageState.BUILDING or row.job_id is None:
        return
    user = row.owner.username
    try:
        job = broker.job(row.job_id, user=user)
        if not job.is_over:
            return
        values: dict[str, object] = {
            "state": ImageState.FAILED,
            "problem": job.explanation or message("The job that built it has ended without an image."),
        }
        if job.state is JobState.COMPLETED:
            text = broker.result(row.job_id, user=user, limit=LONGEST_RESULT).text
            try:
                built = Built.model_validate_json(text)
                values = {**built.model_dump(), "state": ImageState.READY, "built": timezone.now()}
            except ValidationError:
                values["problem"] = message(
                    "The build left nothing that says what is in the image. Build it again."
                )
    except NotFound as error:
        values = {"state": ImageState.FAILED, "problem": error.text}
    if OwnImage.objects.filter(pk=row.pk, state=ImageState.BUILDING).update(**values):
        notifier.notify([user])
    row.refresh_from_db()


def delete(row: OwnImage, broker: BrokerClient) -> None:
    """End the build, remove the file as its owner, and forget the image. Running sessions keep it.

    Raises:
        CarmeError: The file cannot be removed; the image is still there then.
    """
    user = row.owner.username
    if row.state == ImageState.BUILDING and row.job_id is not None:
        with suppress(NotFound):  # it is over
            broker.cancel(row.job_id, user=user)
    try:
        Files(broker, user).remove(row.file)
    except BrokerUnavailable:
        raise
    except FileError as error:
        if error.code != "file" or error.number not in (2, 20):  # it, or its folder, is not there
            raise
    row.delete()
    notifier.notify([user])
