"""How often one may ask: counted in Redis, and in this process where Redis does not answer."""

import functools
import logging
import math
import time

from django.conf import settings
from limits import RateLimitItemPerMinute, storage, strategies

__all__ = ["seconds_to_wait"]

logger = logging.getLogger(__name__)

# After Redis failed, it is queried again after so many seconds.
PAUSE = 30.0
_pause_ends = 0.0


@functools.lru_cache(maxsize=4)
def _counter(address: str) -> strategies.SlidingWindowCounterRateLimiter:
    return strategies.SlidingWindowCounterRateLimiter(storage.storage_from_string(address))


def _redis() -> str:
    """The address of Redis as the library `limits` writes it."""
    return settings.SITE.portal.redis.replace("redis+socket://", "redis+unix://", 1)


def seconds_to_wait(who: str) -> int:
    """Count a request.

    Args:
        who: The token, or the address of a client without a valid one.

    Returns:
        0 when it may pass, else the seconds after which to ask again.
    """
    global _pause_ends
    allowed = RateLimitItemPerMinute(settings.SITE.portal.requests_per_minute)
    now = time.monotonic()
    if now >= _pause_ends:
        try:
            return _count(_counter(_redis()), allowed, who)
        except Exception as error:  # whichever library's: what matters is that Redis does not answer
            logger.warning("Requests are counted in this process, as Redis fails: %s", error)
            _pause_ends = now + PAUSE
    return _count(_counter("memory://"), allowed, who)


def _count(counter: strategies.RateLimiter, allowed: RateLimitItemPerMinute, who: str) -> int:
    if counter.hit(allowed, "carme-api", who):
        return 0
    return max(1, math.ceil(counter.get_window_stats(allowed, "carme-api", who).reset_time - time.time()))
