"""When Slurm would start something, queried once for equal requests of a user within some seconds."""

import hashlib
from datetime import datetime, timedelta

from django.core.cache import cache

from carme.broker import BrokerClient
from carme.errors import BrokerUnavailable, CarmeError, SlurmError
from carme.jobs import JobRequest

__all__ = ["AT_ONCE", "REMEMBERED", "expected_start"]

#: A start that is so near is called "now".
AT_ONCE = timedelta(minutes=1)
REMEMBERED = 15
#: The latest start, the earliest one, and the refusal, which may be a `Message`.
Expected = tuple[datetime | None, datetime | None, str]


def expected_start(request: JobRequest, user: str, broker: BrokerClient) -> Expected:
    """When a job would start at the latest, and at the earliest; and why it never would, else nothing.

    Slurm's plan gives the latest. The earliest holds if jobs end as early as they lately did. Both are None
    where Slurm gives no time.

    Raises:
        CarmeError: Nothing can be queried.
    """
    request = request.model_copy(
        update={"name": "estimate", "command": ["true"], "environment": {}, "files": {}, "prediction": None}
    )
    key = f"estimate:{user}:{hashlib.sha256(request.model_dump_json().encode()).hexdigest()}"
    found: Expected | None = cache.get(key)
    if found is None:
        try:
            estimate = broker.test(request, user=user)
            found = estimate.start, estimate.earliest, ""
        except BrokerUnavailable:
            raise
        except CarmeError as error:
            if isinstance(error, SlurmError) and error.code == "slurm-away":
                raise
            found = None, None, error.text  # each reader gets it in their language
        cache.set(key, found, REMEMBERED)
    return found
