"""Starts processes that would outlive it: one in its own group, one in a separate group, and one that keeps the
answers' pipe open; then dies, or obeys, as its second argument says. Their ids go to the file of its first.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.engine.children import talk

talk.hear()
answers = int(sys.argv[sys.argv.index("--answers-fd") + 1])
sleep = ["sleep", "3600"]
started = [
    subprocess.Popen(sleep),
    subprocess.Popen(sleep, process_group=0),
    subprocess.Popen(sleep, pass_fds=(answers,)),
]
Path(sys.argv[1]).write_text(" ".join(str(process.pid) for process in started))
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
talk.obey(tokens_per_s=10.0)
