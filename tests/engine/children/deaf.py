"""Ignores the end of its stdin and every signal that can be ignored, and writes its process id to a file."""

import os
import signal
import sys
import time
from pathlib import Path

from tests.engine.children import talk

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
talk.hear()
Path(sys.argv[1]).write_text(str(os.getpid()))
talk.say("progress", doing="deaf")
while True:
    time.sleep(3600)
