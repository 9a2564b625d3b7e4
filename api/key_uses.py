"""When each key was last used: noted in memory, written once a minute, so that no request waits for a write."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime

import structlog

from optigpu.store import keys
from optigpu.store.database import Database
from optigpu.vocabulary import utc_now

WRITE_EVERY_S = 60.0
logger = structlog.stdlib.get_logger("api.key_uses")


class KeyUses:
    """The uses that are not written yet. If the process dies, the last minute of them is lost."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._uses: dict[str, datetime] = {}
        self._changing = threading.Lock()

    def note(self, key_id: str) -> None:
        """The key is used now."""
        with self._changing:
            self._uses[key_id] = utc_now()

    def write(self) -> None:
        """Writes what was noted since the last write. What cannot be written is logged, and kept for the next one."""
        with self._changing:
            uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            with self._database.write() as session:
                keys.note_uses(session, uses)
        except Exception as error:  # one failure must not end the loop that writes
            logger.warning("key_uses_not_written", reason=str(error))
            with self._changing:
                self._uses = uses | self._uses

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Writes once a minute while the block lasts, and at its end."""
        task = asyncio.create_task(self._write_regularly())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await asyncio.to_thread(self.write)

    async def _write_regularly(self) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await asyncio.to_thread(self.write)
