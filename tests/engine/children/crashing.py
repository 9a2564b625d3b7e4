"""Says that it does what its first argument says, notes that it reads the kept model of the second, and crashes."""

import os
import signal
import sys
from pathlib import Path

from optigpu.backends.converted import note_use
from tests.engine.children import talk

folder = Path(talk.hear()["folder"])
talk.say("progress", doing=sys.argv[1])
if os.path.isabs(sys.argv[2]):
    note_use(folder, Path(sys.argv[2]))
print("last words", file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGABRT)
