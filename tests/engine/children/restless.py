"""As well_behaved; a thread of each variant with techniques computes on for a while after it has answered.

Its argument says for how many seconds.
"""

import sys
import threading
import time

from tests.engine.children import talk

LASTS_S = float(sys.argv[1])
assignment = talk.hear()
is_restless = bool(assignment["variant"]["stack"])


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def begin_to(command: str) -> None:
    if is_restless and command == "run_round":
        threading.Thread(target=compute, args=(LASTS_S,)).start()


talk.obey(tokens_per_s=10.0, before=begin_to)
