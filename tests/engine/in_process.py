"""What a measuring process answers, without a process: it runs in this one, which has loaded torch already."""

import gc
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch

from optigpu.child import replicate
from optigpu.child.messages import ANSWER, Answer
from optigpu.conductor.processes.child import Child
from optigpu.vocabulary import Frozen


class InProcess:
    """Told and listened to as a `Child` is. Every message is JSON on its way, and every answer too."""

    pid = os.getpid()

    def __init__(self) -> None:
        self._answers: deque[str] = deque()
        self._subject: replicate.Subject | None = None

    def tell(self, message: Frozen) -> None:
        """Has it answered before this returns; the first message is the assignment."""
        line = message.model_dump_json()
        if self._subject is None:
            self._subject = replicate._begin(line, self._say)
        else:
            replicate._obey(line, self._subject, self._say)

    def listen(self) -> Answer:
        """The next answer, of those that there are."""
        return ANSWER.validate_json(self._answers.popleft())

    def _say(self, answer: Answer) -> None:
        self._answers.append(answer.model_dump_json())


@contextmanager
def in_process() -> Iterator[Child]:
    """One of them; what it does to this process is undone."""
    threads = torch.get_num_threads()
    try:
        yield cast(Child, InProcess())
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()
