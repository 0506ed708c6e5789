"""Images that users build, for programs."""

from http import HTTPStatus
from typing import Any

from django.http import Http404, HttpRequest
from ninja import Router, Status
from ninja.params.functions import Path

from carme import api as wire
from carme_webui.accounts.models import User
from carme_webui.api import schemas
from carme_webui.api.access import asker, require
from carme_webui.api.answers import GONE, REFUSED, answers
from carme_webui.cluster import broker, images
from carme_webui.images import services as image_services
from carme_webui.images.models import OwnImage

__all__ = ["router"]

ImageReference = Path(..., pattern=r"^[a-z0-9][a-z0-9_.-]{0,30}(@[A-Za-z0-9_.-]{1,150})?$")

router = Router(tags=["images"])


@router.get("", response=answers(list[wire.ImageBuild]))
def list_own_images(request: HttpRequest) -> Any:
    """The images that I have built, and those that my projects share."""
    return [schemas.image_out(row) for row in OwnImage.visible(asker(request))]


@router.post("", response=answers(wire.ImageBuild, HTTPStatus.CONFLICT, status=HTTPStatus.CREATED))
def build_image(request: HttpRequest, requested: image_services.ImageIn) -> Any:
    """Have a batch job of mine build an image; `job_id` is that job, whose log can be followed."""
    user = require(request, "images")
    return Status(
        HTTPStatus.CREATED, schemas.image_out(image_services.build(user, requested, images(), broker()))
    )


@router.get("/{reference}", response=answers(wire.ImageBuild, *GONE))
def show_own_image(request: HttpRequest, reference: str = ImageReference) -> Any:
    """One of them; a build that has ended is noted at once."""
    user = asker(request)
    found = _image(user, reference)
    if found.owner == user:
        image_services.settle(found, broker())
    return schemas.image_out(found)


@router.put("/{reference}/share", response=answers(wire.ImageBuild, *REFUSED))
def share_own_image(
    request: HttpRequest, requested: image_services.ShareIn, reference: str = ImageReference
) -> Any:
    """Let the members of a project of mine use an image of mine, or, without one, nobody else any more."""
    user = require(request, "images")
    found = _image(user, reference)
    if found.owner != user:
        raise Http404
    image_services.share(found, requested, broker())
    return schemas.image_out(found)


@router.delete("/{reference}", response=answers(None, *REFUSED, status=HTTPStatus.NO_CONTENT))
def delete_own_image(request: HttpRequest, reference: str = ImageReference) -> Any:
    """Delete an image of mine with its file; a build is ended."""
    user = require(request, "images")
    found = _image(user, reference)
    if found.owner != user:
        raise Http404
    image_services.delete(found, broker())
    return Status(HTTPStatus.NO_CONTENT, None)


def _image(user: User, reference: str) -> OwnImage:
    found = OwnImage.named(user, reference)
    if found is None:
        raise Http404
    return found
