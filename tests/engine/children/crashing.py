"""Says that it does what its first argument says, and crashes."""

import os
import signal
import sys

from tests.engine.children import talk

talk.hear()
talk.say("progress", doing=sys.argv[1])
print("last words", file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGABRT)
