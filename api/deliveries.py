"""Sends what waits in the outbox of webhooks. Each process of the API does; one at a time takes a delivery."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress

import structlog

from api.outgoing import DeliveryError, Sender
from optigpu.store import outbox
from optigpu.store.database import Database
from optigpu.store.outbox import Delivery
from optigpu.vocabulary import utc_now

LOOK_EVERY_S = 2.0
AFTER_AN_ERROR_S = 30.0
FORGET_EVERY_S = 3600.0
AT_ONCE = 8
"""Deliveries that are sent side by side, so that a slow receiver does not hold up the others."""
logger = structlog.stdlib.get_logger("api.deliveries")


class Deliveries:
    """Looks for deliveries while the service runs."""

    def __init__(self, database: Database, allowed_hosts: Collection[str]) -> None:
        self._database = database
        self._sender = Sender(allowed_hosts)
        self._forget_at = time.monotonic() + FORGET_EVERY_S

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Delivers while the block lasts. What is being sent at its end is sent again by another process, or later."""
        task = asyncio.create_task(self._look_regularly())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def deliver_due(self) -> int:
        """Sends at most AT_ONCE deliveries that are due; returns how many."""
        due = await asyncio.to_thread(self._take)
        await asyncio.gather(*(self._deliver(each) for each in due))
        return len(due)

    async def _look_regularly(self) -> None:
        while True:
            try:
                sent = await self.deliver_due()
            except Exception as error:  # a database that is away must not end the loop
                logger.warning("deliveries_not_made", reason=str(error))
                await asyncio.sleep(AFTER_AN_ERROR_S)
            else:
                if sent < AT_ONCE:
                    await asyncio.sleep(LOOK_EVERY_S)

    async def _deliver(self, delivery: Delivery) -> None:
        try:
            await self._sender.send(delivery, utc_now())
        except DeliveryError as error:
            logger.warning(
                "webhook_failed", delivery=delivery.id, attempt=delivery.attempt, reason=str(error)
            )
            await asyncio.to_thread(self._failed, delivery, str(error))
        else:
            await asyncio.to_thread(self._delivered, delivery)

    def _take(self) -> list[Delivery]:
        self._forget()
        with self._database.read() as session:
            if not outbox.is_due(session):
                return []
        with self._database.write() as session:
            return outbox.take(session, AT_ONCE)

    def _delivered(self, delivery: Delivery) -> None:
        with self._database.write() as session:
            outbox.delivered(session, delivery)

    def _failed(self, delivery: Delivery, error: str) -> None:
        with self._database.write() as session:
            outbox.failed(session, delivery, error)

    def _forget(self) -> None:
        if time.monotonic() < self._forget_at:
            return
        self._forget_at = time.monotonic() + FORGET_EVERY_S
        with self._database.write() as session:
            outbox.forget(session)
