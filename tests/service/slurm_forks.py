"""Pilots for a test with many jobs: one process has imported everything and forks for each of them.

`python -m tests.service.slurm_forks SOCKET` serves; `client` is the program of an allocation, which waits for the fork.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.pages import ROOT

CLIENT = """\
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as served:
    served.connect(sys.argv[1])
    served.sendall(json.dumps([sys.argv[2:], dict(os.environ)]).encode() + b"\\n")
    sys.exit(int(served.makefile().readline()))
"""


@contextlib.contextmanager
def forks(folder: Path) -> Iterator[str]:
    """The command line of a pilot that is forked."""
    place, program = folder / "forks", folder / "client.py"
    program.write_text(CLIENT)
    server = subprocess.Popen([sys.executable, "-m", "tests.service.slurm_forks", str(place)], cwd=ROOT)
    try:
        yield f"{sys.executable} -S -E {program} {place}"
    finally:
        server.terminate()
        server.wait()


def _serve(place: str) -> None:
    from tests.service import slurm_pilot

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them but their clients
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen(16)
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                with connection:
                    arguments, variables = json.loads(connection.makefile().readline())
                    os.environ.clear()
                    os.environ.update(variables)
                    sys.argv = ["worker", *arguments]
                    connection.sendall(f"{slurm_pilot.main()}\n".encode())
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    _serve(sys.argv[1])
