"""Notes its process id, and whether an interrupt reaches it; ends when its stdin closes."""

import os
import signal
import sys
from pathlib import Path

from tests.engine.children import talk

folder = Path(sys.argv[1])
signal.signal(signal.SIGINT, lambda *_: (folder / "interrupted").touch())
talk.hear()
(folder / "pid.new").write_text(str(os.getpid()))
(folder / "pid.new").rename(folder / "pid")
talk.hear()
