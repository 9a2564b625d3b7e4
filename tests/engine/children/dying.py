"""Dies in the middle of a round, from the replicate on that is its second argument.

The first argument says how: a number is its exit status, a name a signal. A third argument is a file whose counter
it raises before, as the kernel counts whom it kills for memory.
"""

import os
import signal
import sys
from pathlib import Path

from tests.engine.children import talk

how, first = sys.argv[1], int(sys.argv[2])
if talk.hear()["replicate"] >= first:
    talk.ready()
    talk.hear()
    talk.write(b'{"kind": "round", "samp')
    print("last words", file=sys.stderr, flush=True)
    if sys.argv[3].startswith("/"):
        Path(sys.argv[3]).write_text("oom_kill 8\n")
    if how.isdigit():
        os._exit(int(how))
    os.kill(os.getpid(), signal.Signals[how])
talk.obey(tokens_per_s=10.0)
