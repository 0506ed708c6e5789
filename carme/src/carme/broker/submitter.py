"""Turns a job's request into an order for Slurm, and submits it."""

import secrets
from datetime import UTC, datetime

from carme.broker.context import Context
from carme.broker.records import Record
from carme.broker.staging import check_stages, constraint, stage_specs
from carme.errors import CarmeError
from carme.jobs import JobRequest, check, partition_of, share
from carme.launch.spec import JobSpec, StagingPlaces
from carme.slurm import Order, UnixAccount


class Submitter:
    """Makes orders and submits them."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def order(self, request: JobRequest, owner: UnixAccount) -> Order:
        """The order that a checked request makes. Raises InvalidRequest, Denied."""
        settings, cluster = self._context.settings, self._context.watch.cluster()
        check(request, cluster, self._context.images, settings, await self._context.accesses.of(owner))
        check_stages(request, settings)
        part = share(request, cluster, settings)
        file, digest = self._image_of(request)
        return Order(
            key=secrets.token_hex(16),
            request=request,
            partition=partition_of(request, cluster, settings).name,
            account=request.account or settings.slurm.default_account,
            share=part,
            constraint=constraint(request),
            spec=JobSpec(
                name=request.name,
                kind=request.kind,
                image=file,
                image_name=request.image,
                digest=digest,
                own_image=request.image_file is not None,
                command=request.command,
                nodes=request.nodes,
                cpus=part.cpus,
                gpus=request.gpus_per_node,
                gpu_type=request.gpu_type,
                workdir=request.workdir,
                binds=[str(path) for path in settings.sessions.bind],
                stage=stage_specs(request.stage),
                results=request.results,
                array=request.array is not None,
                staging=StagingPlaces(
                    cache=str(settings.staging.cache),
                    cache_gb=settings.staging.cache_gb,
                    scratch=str(settings.staging.scratch or ""),
                    beeond=str(settings.staging.beeond or ""),
                ),
                help=f"{settings.site.url.rstrip('/')}/help",
            ),
        )

    async def start(self, order: Order, owner: UnixAccount) -> int:
        """Submit a job. It is on record before Slurm has it: the broker may end before the answer comes."""
        request, book = order.request, self._context.book
        known = {"key": order.key, "user": owner.name, "name": request.name, "image": request.image}
        known |= {"kind": request.kind, "array": request.array or "", "submitted": datetime.now(UTC)}
        known |= {"prediction": request.prediction}
        book.records.begin(Record.model_validate(known))
        await book.save()
        try:
            job_id = await self._context.slurm.submit(order, owner)
        except CarmeError as error:
            if error.code != "slurm-away":
                book.records.refused(order.key)
            raise
        book.records.took(order.key, job_id)
        return job_id

    async def track(self, order: Order, owner: UnixAccount, job_id: int) -> None:
        """Have a job that was just submitted in the snapshot, as it is at first."""
        await self._context.watch.add(order.job(job_id, owner.name))

    def _image_of(self, request: JobRequest) -> tuple[str | None, str]:
        """The file that a job runs in, and the digest that it has, or must have if it is a user's own."""
        if request.image is None:
            return None, ""
        if request.image_file is not None:
            return request.image_file.file, request.image_file.digest
        image = self._context.images.get(request.image)
        return str(image.file), image.digest
