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
LISTENING = "listening\n"
"""What the process that forks prints when the first client may come."""


@contextlib.contextmanager
def forks(folder: Path) -> Iterator[str]:
    """The command line of a pilot that is forked, once there is a process that forks."""
    place, program = folder / "forks", folder / "client.py"
    program.write_text(CLIENT)
    command = [sys.executable, "-m", "tests.service.slurm_forks", str(place)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == LISTENING
            yield f"{sys.executable} -S -E {program} {place}"
        finally:
            server.terminate()


def _serve(place: str) -> None:
    from tests.service import slurm_pilot

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them but their clients
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen(16)
        print(LISTENING, end="", flush=True)
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
