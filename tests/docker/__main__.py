"""`python -m tests.docker`: builds the image and runs what the compose files start, in a Docker of the tests' own.

A machine with Docker is a folder with Debian in it (`host.py`), which is entered in namespaces of its own: its network,
its mounts and its processes end with the run, and nothing of this machine is changed. What took long is kept in the
cache: Debian, the images, Docker's layers. Needs root on Debian or Ubuntu. Other arguments go to pytest.
"""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.docker.host import INSIDE, cache_folder
from tests.servers.process import this_machine
from tests.servers.rule import apt_installs

PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "slirp4netns": "slirp4netns",
    "ip": "iproute2",
    "unshare": "util-linux",
}
"""What is called here, and the package that has it."""
TIMEOUT_S = 2400
"""For a test: the first one waits until Debian is there and the image is built."""
ENTER = """
ip link set lo up
echo up >&"$READY"
until ip link show tap0 >/dev/null 2>&1; do sleep 0.1; done
exec "$@"
"""
NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def main(arguments: Sequence[str]) -> int:
    """Returns pytest's exit status, or 2 with a sentence on a machine that cannot do it."""
    machine = this_machine()
    if not machine.is_root or "debian" not in machine.families:
        print("The image is tested as root on Debian or Ubuntu: it makes file systems.", file=sys.stderr)
        return 2
    missing = [package for name, package in PROGRAMS.items() if machine.program(name) is None]
    if missing and not apt_installs(" ".join(missing), machine):
        print(
            f"Install what the tests of the image need: apt-get install {' '.join(missing)}", file=sys.stderr
        )
        return 2
    return inside([sys.executable, "-m", "pytest", "-o", f"timeout={TIMEOUT_S}", "tests/docker", *arguments])


def inside(command: Sequence[str]) -> int:
    """Runs a command in new namespaces with a network that reaches out and cannot be reached; returns its status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # there is one machine
        return _inside(command)


def _inside(command: Sequence[str]) -> int:
    ready, told = os.pipe()
    variables = os.environ | {INSIDE: "1", "READY": str(told)}
    started = subprocess.Popen(
        [*NAMESPACES, "sh", "-c", ENTER, "sh", *command], env=variables, pass_fds=[told]
    )
    os.close(told)
    os.read(ready, 1)
    (child,) = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    network = subprocess.Popen(
        ["slirp4netns", "--configure", "--mtu=65520", "--disable-host-loopback", child, "tap0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return started.wait()
    finally:
        started.kill()  # and with it all that runs in the namespaces
        network.terminate()
        network.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
