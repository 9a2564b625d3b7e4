"""Rate limits for keys and addresses, counted in memory (embedded) or in Redis (service)."""

import time
from typing import TYPE_CHECKING

import structlog

from api.problems import ProblemError

if TYPE_CHECKING:
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import RateLimiter as Strategy

BROKEN_FOR_S = 30.0
REDIS_WAIT_S = 1.0
logger = structlog.stdlib.get_logger("api.limits")


class RateLimiter:
    """A moving window for each identity. `rate` is written like "600/minute".

    While Redis is away each process counts for itself, so that a service without its broker still answers.
    """

    def __init__(self, rate: str, redis_url: str | None) -> None:
        from limits import parse
        from limits.aio.storage import MemoryStorage
        from limits.aio.strategies import SlidingWindowCounterRateLimiter

        self._rate = parse(rate)
        self._own = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._shared = SlidingWindowCounterRateLimiter(_redis_storage(redis_url)) if redis_url else None
        self._shared_again_at = 0.0

    async def count(self, identity: str) -> None:
        """Counts one call. Raises ProblemError 429, with the time to wait, if the limit is exceeded."""
        limiter = self._limiter()
        try:
            within = await limiter.hit(self._rate, identity)
        except Exception as error:
            if limiter is self._own:
                raise
            logger.warning("rate_limit_counts_in_memory", reason=str(error), seconds=BROKEN_FOR_S)
            self._shared_again_at = time.monotonic() + BROKEN_FOR_S
            within = await self._own.hit(self._rate, identity)
        if not within:
            raise await self._refusal(identity)

    async def _refusal(self, identity: str) -> ProblemError:
        """429, with the time to wait."""
        try:
            window = await self._limiter().get_window_stats(self._rate, identity)
            reset_s = window.reset_time - time.time()
        except Exception:  # Redis went away after it had counted
            reset_s = self._rate.get_expiry()
        wait_s = max(1, round(reset_s))
        return ProblemError(
            429,
            f"More than {self._rate.amount} calls in {self._rate.get_expiry()} s; try again in {wait_s} s.",
            headers={"Retry-After": str(wait_s)},
        )

    def _limiter(self) -> "Strategy":
        if self._shared is None or time.monotonic() < self._shared_again_at:
            return self._own
        return self._shared


def _redis_storage(url: str) -> "RedisStorage":
    from limits.aio.storage import RedisStorage

    return RedisStorage(
        url,
        implementation="redispy",
        key_prefix="optigpu:limits",
        socket_connect_timeout=REDIS_WAIT_S,
        socket_timeout=REDIS_WAIT_S,
    )
